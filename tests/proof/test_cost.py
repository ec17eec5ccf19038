"""What a splice costs: formulas by hand, counts on real engines, pages from JSON alone."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bytes_tokenizer import bytes_tokenizer
from leyline.engine.engine import Config, Engine
from leyline.proof import growth, paper_gpu, paper_table, peers, report, rows
from leyline.proof.__main__ import main
from leyline.proof.engines import PEERS, Answer, Setting
from leyline.proof.pages import page
from leyline.proof.paper_gpu import (
    H100,
    H200,
    Assumed,
    Edit,
    Gpu,
    Grouped,
    Latent,
    Model,
    Where,
    deepseek_v2_lite,
    deepseek_v3,
    pass_seconds,
    prefill_seconds,
    rows_seconds,
    splice_seconds,
)
from leyline.tiny import tiny_model

ROOT = Path(__file__).parents[2]
TOKENS = np.random.default_rng(3).integers(3, 500, 3000)

# -- the model on paper -----------------------------------------------------------------------

ROUND = Gpu("round", bytes_s=1000.0, flops_s=100.0, flops8_s=400.0)
FULL = Assumed(1.0, 1.0, 1.0, 1.0, host_s=0.25, kernels=2, launch_s=0.0, chunk=4, passes=1)
SMALL = Model("small", layers=2, heads=4, attention=Grouped(2, 5), linear=300.0, head=50.0)


def test_a_pass_by_hand() -> None:
    """3 tokens behind 2: linear 2*300*3 = 1800 FLOPs = 18 s, weights 700 bytes = 0.7 s. Rows read
    3 + 4 + 5 = 12; 2 layers * 2 * 4 heads * 2 * 5 columns * 12 = 1920 FLOPs = 19.2 s."""
    assert pass_seconds(SMALL, Where(ROUND), FULL, 3, 5) == pytest.approx(18 + 19.2)
    assert pass_seconds(SMALL, Where(ROUND, 2), FULL, 3, 5) == pytest.approx((18 + 19.2) / 2)
    eight = replace(SMALL, weight_bytes=1)
    assert pass_seconds(eight, Where(ROUND), FULL, 3, 5) == pytest.approx(1800 / 400 + 19.2)
    slow = replace(FULL, linear=0.5, attention=0.25)
    assert pass_seconds(SMALL, Where(ROUND), slow, 3, 5) == pytest.approx(36 + 4 * 19.2)


def test_a_pass_is_no_faster_than_memory_or_launches() -> None:
    thin = replace(ROUND, bytes_s=10.0)  # weights 70 s, rows 5 * 2 layers * 20 * 2 bytes = 40 s
    assert pass_seconds(SMALL, Where(thin), FULL, 3, 5) == pytest.approx(70 + 40)
    launches = replace(FULL, launch_s=1000.0)
    assert pass_seconds(SMALL, Where(ROUND), launches, 3, 5) == 2 * 2 * 1000


def test_chunks_of_a_prefill_add_up() -> None:
    """7 tokens, 4 in a pass: attention is that of one pass, 28 rows read."""
    parts = [pass_seconds(SMALL, Where(ROUND), FULL, *p) for p in ((4, 4), (3, 7))]
    assert prefill_seconds(SMALL, Where(ROUND), FULL, 7) == pytest.approx(sum(parts))
    assert sum(parts) == pytest.approx(2 * 300 * 7 / 100 + 2 * 80 * 28 / 100)
    assert prefill_seconds(SMALL, Where(ROUND), FULL, 4) == parts[0]


@pytest.mark.parametrize(("tokens", "context"), [(1, 1), (1, 9), (4, 4), (3, 11)])
def test_reads_are_those_of_a_causal_mask(tokens: int, context: int) -> None:
    mask = np.tril(np.ones((context, context)))[context - tokens :]
    assert paper_gpu.reads(tokens, context) == mask.sum()


def test_latent_attention_takes_the_cheaper_way() -> None:
    """One query over a long context does not expand it; a first pass does."""
    mla, heads = Latent(), 16
    decode = mla.flops(heads, 1000, 999)
    assert decode == 2 * 16 * (576 + 512) * 1000
    assert decode < 2 * 16 * 320 * 1000 + 2 * 512 * 16 * 256 * 999
    assert mla.flops(heads, paper_gpu.reads(1000, 1000), 0) == 2 * 16 * (128 + 64 + 128) * 500500
    assert (mla.row, mla.rotary) == (576, 64)


def test_rows_by_hand() -> None:
    """DeepSeek-V2-Lite: 128 of 1152 bytes turn, 27 layers, read and written."""
    lite, where = deepseek_v2_lite(), Where(H100)
    full = replace(Assumed(), rows=1.0)
    turn = rows_seconds(lite, where, full, 100_000, "move")
    assert turn == pytest.approx(2 * 27 * 128 * 100_000 / 3.35e12)
    assert rows_seconds(lite, where, full, 100_000, "copy") == pytest.approx(9 * turn)
    assert rows_seconds(lite, Where(H100, 8), full, 100_000, "move") == turn


def test_a_splice_is_host_rows_and_passes() -> None:
    edit = Edit(conversation=20, start=5, span=6, stub=2, new=3)
    assert (edit.kept, edit.prompt) == (9, 19)
    one = splice_seconds(SMALL, Where(ROUND), FULL, edit)
    assert one.passes == pass_seconds(SMALL, Where(ROUND), FULL, 5, 19)
    assert one.rows == pytest.approx(2 * 9 * 2 * 10 * 2 / 1000)
    assert one.total == pytest.approx(0.25 + one.rows + one.passes)
    two = splice_seconds(SMALL, Where(ROUND), replace(FULL, passes=2), edit)
    apart = [pass_seconds(SMALL, Where(ROUND), FULL, *p) for p in ((2, 7), (3, 19))]
    assert two.passes == pytest.approx(sum(apart))
    deleted = replace(edit, stub=0)
    both = [splice_seconds(SMALL, Where(ROUND), replace(FULL, passes=n), deleted) for n in (1, 2)]
    assert both[0] == both[1], "nothing to run apart"


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [(deepseek_v2_lite(), 15.7, 2.4), (deepseek_v3(), 671, 37)],
    ids=lambda value: getattr(value, "name", None),
)
def test_parameters_are_the_published_ones(model: Model, billions: float, active: float) -> None:
    """All of them, and those of a token with its embedding or head."""
    facts = paper_table._facts(model)
    assert facts["parameters"] / 1e9 == pytest.approx(billions, rel=0.005)
    assert (model.linear + model.head) / 1e9 == pytest.approx(active, rel=0.03)
    everything = (facts["parameters"] - model.head) * model.weight_bytes  # no embedding is read
    assert model.weights_read(10_000) == pytest.approx(everything, rel=1e-6)
    assert model.weights_read(1) == pytest.approx((model.linear + model.head) * model.weight_bytes)


@pytest.mark.parametrize("model", [deepseek_v2_lite(), deepseek_v3()], ids=lambda m: m.name)
def test_longer_contexts_favour_the_splice(model: Model) -> None:
    lines = [paper_table.line(model, Where(H200, 8), Assumed(), n) for n in paper_table.SIZES]
    ratios = [line.ratio for line in lines]
    assert ratios == sorted(ratios, reverse=True) and ratios[-1] < ratios[0]
    assert [line.prefill_s for line in lines] == sorted(line.prefill_s for line in lines)
    assert all(line.move_s < line.copy_s < line.prefill_s for line in lines)
    slower = [paper_table.line(model, Where(H100, 8), Assumed(), n) for n in paper_table.SIZES]
    assert all(a.move_s >= b.move_s for a, b in zip(slower, lines, strict=True))


def test_a_line_grants_the_re_prefill_its_exact_prefix() -> None:
    """As the measurements do, which the page compares it with."""
    line = paper_table.line(SMALL, Where(ROUND), FULL, 1000)
    edit = Edit(1000)
    assert line.prefill_s == prefill_seconds(SMALL, Where(ROUND), FULL, edit.prompt, edit.start)
    prefix = prefill_seconds(SMALL, Where(ROUND), FULL, edit.start)
    whole = prefill_seconds(SMALL, Where(ROUND), FULL, edit.prompt)
    assert line.prefill_s == pytest.approx(whole - prefix) and prefix > 0


def test_swings_change_one_assumption() -> None:
    lite = deepseek_v2_lite()
    for swing in paper_table.swings(lite, Where(H100), Assumed(), 32768):
        changed = replace(Assumed(), **{swing.assumption: swing.high})
        edit = Edit(32768)
        splice = splice_seconds(lite, Where(H100), changed, edit).total
        whole = prefill_seconds(lite, Where(H100), changed, edit.prompt, edit.start)
        assert swing.at_high == splice / whole
        low, high = paper_table.AROUND[swing.assumption]
        assert low <= getattr(Assumed(), swing.assumption) <= high


# -- growth -----------------------------------------------------------------------------------


def test_growth_computes_stub_and_new_tokens_at_every_size() -> None:
    with Engine(tiny_model("llama"), None, Config(memory_gib=0.05), "tiny") as engine:
        found = growth.splices(engine, TOKENS, (100, 300), 1, start=40, span=90)
        shape = growth.shape_of(engine)
    assert [(c.kept, c.way) for c in found] == [
        (n, way) for n in (100, 300) for way in ("moved", "copied")
    ]
    assert [c.computed for c in found] == [70] * 4
    for cost in found:
        edit = Edit(**cost.edit)
        assert edit.kept == cost.kept and 0 < cost.splice_s < cost.splice_ttft_s
    facts = {"layers": 3, "hidden": 64, "intermediate": 96, "heads": 4, "groups": 2, "width": 64}
    assert shape == facts | {"vocab": 512, "bytes": 4, "chunk": 1024}
    model = paper_table.smollm2(shape)
    linears = [p for name, p in tiny_model("llama").named_parameters() if p.dim() == 2]
    assert model.linear + 2 * model.head == sum(p.numel() for p in linears)


def test_rows_are_scaled_to_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = rows.Shape("small", 6, True)
    whole = rows.measure(shape, 64, 1)
    assert (whole.layers, whole.measured_layers) == (6, 6)
    assert whole.turned_bytes == 2 * 64 * 6 * 128 and whole.row_bytes == 2 * 64 * 6 * 1152
    monkeypatch.setattr(rows, "BUDGET", 2 * 2 * 64 * 1152)
    assert rows.measure(shape, 64, 1).measured_layers == 2
    assert rows.measure(shape, 4096, 1).measured_layers == 1


# -- peers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GQA model and a tokenizer, as Transformers saves them."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model: Any = tiny_model("llama")
    model.save_pretrained(folder)
    bytes_tokenizer().save_pretrained(folder)
    return folder


def test_prompts_differ_in_their_first_token_only() -> None:
    (edit, deletion) = peers.edits((400,), stub=7, new=11)
    stub = np.arange(20)
    made = [peers.prompts(TOKENS, stub, edit, serial, 500) for serial in range(3)]
    firsts = [p[0] for each in made for p in (each.source, each.cold)]
    assert len(set(firsts)) == 6 and max(firsts) == 499
    for each in made:
        assert (each.source[1:] == TOKENS[1:400]).all() and len(each.source) == 400
        assert (each.edited[1:] == each.cold[1:]).all() and each.edited[0] == each.source[0]
        expected = [*TOKENS[1:50], *stub[:7], *TOKENS[150:400], *TOKENS[400:411]]
        assert each.edited[1:].tolist() == expected
    assert (deletion.kind, deletion.stub) == ("delete", 0)
    assert len(peers.prompts(TOKENS, stub, deletion, 0, 500).edited) == 400 - 100 + 11


def test_embedded_peer_over_http(tiny_directory: Path) -> None:
    """With a session only stub and new tokens are computed; without, all behind the edit."""
    (ours,) = (peer for peer in PEERS if peer.sessions and peer.package == "leyline-kv")
    plain = replace(ours, sessions=False)
    with ours.start(Setting(tiny_directory, None, 600, 1)) as client:
        stub = np.arange(500, 507)
        kinds = peers.edits((400,), stub=7, new=11)
        for first, peer in enumerate((ours, plain)):
            made = [
                [peers.prompts(TOKENS, stub, edit, 4 * first + 2 * k + i, 500) for i in range(2)]
                for k, edit in enumerate(kinds)
            ]
            cases = peers.measure(client, peer, kinds, made)
            for edit, case in zip(kinds, cases, strict=True):
                behind = case.prompt - edit.start
                assert case.computed == (edit.stub + edit.new if peer.sessions else behind)
                assert case.prompt == 400 - 100 + edit.stub + 11
                assert len(case.pairs) == 2 and min(min(pair) for pair in case.pairs) > 0
            replaced, deleted = cases
            assert replaced.cold_s == deleted.cold_s and replaced.pairs != deleted.pairs
        with pytest.raises(RuntimeError, match="that was meant to be new came from a cache"):
            peers.measure(client, plain, kinds, made)


def test_llamacpp_peers(smollm2: Path) -> None:
    """cache-reuse helps a deletion and no replacement, as the page says."""
    pytest.importorskip("xllamacpp")
    from leyline.bench.bed import Bed

    bed = Bed(smollm2, 1)
    setting = Setting(smollm2, peers.gguf_of_smollm2(), 1000, 2)
    chosen = [peer for peer in PEERS if peer.package == "xllamacpp"]
    found = peers.run(setting, bed.tokenizer, bed.tokens(800), chosen, quick=True)
    by = {(c["peer"], c["edit"]["kind"]): c["computed"] for c in found["cases"]}
    assert by["llama.cpp", "replace"] == 520 - 75 and by["llama.cpp", "delete"] == 500 - 75
    assert by["llama.cpp, cache-reuse 64", "replace"] == 520 - 75
    assert by["llama.cpp, cache-reuse 64", "delete"] < 120


# -- pages ------------------------------------------------------------------------------------


def test_growth_and_model_from_the_command_line(tiny_directory: Path, tmp_path: Path) -> None:
    """JSON, page and picture; the page again from the JSON alone, and the check of the formulas."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "results"
    main(["growth", "--out", str(out), "--quick", "--model", str(tiny_directory)])
    main(["model", "--out", str(out), "--quick"])
    for kind in ("growth", "model"):
        text = (out / f"{kind}.md").read_text()
        picture = (out / f"{kind}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and f"{kind}.png" in text
        (out / f"{kind}.md").unlink()
        main(["page", str(out / f"{kind}.json")])
        assert (out / f"{kind}.md").read_text() == text
        assert str(tmp_path) not in text + (out / f"{kind}.json").read_text()
        assert "A quick run" in text and "nan" not in text
    data = json.loads((out / "growth.json").read_text())["data"]
    assert [c["computed"] for c in data["splices"]] == [70] * 4
    checked = json.loads((out / "model.json").read_text())["data"]["checked"]
    assert [c["splice_s"] for c in checked] == [c["splice_ttft_s"] for c in data["splices"]]
    assert all(0 < c["splice_on_paper_s"] < c["prefill_on_paper_s"] for c in checked)
    assert "of the measured ratio: they" in (out / "model.md").read_text()


def test_a_page_shows_the_numbers_of_the_json() -> None:
    """Changing one number changes the page, and that number is on it."""
    data = {
        "threads": 2,
        "repeats": 3,
        "peers": [{"name": "x", "what": "y", "package": "p", "version": "1.2"}],
        "cases": [
            {
                "peer": "x",
                "edit": dict(conversation=600, kind="replace", start=75, span=150, stub=20, new=50),
                "prompt": 520,
                "computed": 70,
                "edited_s": 0.0123,
                "cold_s": 1.5,
                "ratio": 0.0082,
                "pairs": [],
            }
        ],
    }
    where = {"cpu": "c", "platform": "l", "cores": 2, "python": "3", "versions": {}}
    result = report.found("peers", ["peers", "--out", "/tmp/secret/here"], where, False, data)
    text = page(result)
    assert "| x | 70 | 520 | 12.3 ms | 1.5 s | 0.0082 |" in text
    assert "## 600 tokens: 150 at 75 replaced by 20, 50 new" in text
    assert "python -m leyline.proof peers --out here" in text and "quick" not in text
    data["cases"][0]["computed"] = 71  # type: ignore[index]
    assert "| 71 | 520 |" in page(result)


def _checked(splice_s: float, prefill_s: float, splice: float, prefill: float) -> dict[str, Any]:
    """A line of the check, the latter two on paper."""
    times = {"splice_s": splice_s, "prefill_s": prefill_s}
    on_paper = {"splice_on_paper_s": splice, "prefill_on_paper_s": prefill}
    return {"kept": 1024, "way": "moved", **times, **on_paper}


@pytest.mark.parametrize(
    ("checked", "cells", "says"),
    [
        (
            [_checked(0.4, 2.0, 0.1, 1.0), _checked(1.0, 20.0, 0.4, 10.0)],
            ["| 0.200 | 0.100 | 0.50 |", "| 0.0500 | 0.0400 | 0.80 |"],
            "give between 0.50 and 0.80 of the measured ratio: they are too optimistic",
        ),
        (
            [_checked(0.4, 2.0, 0.3, 1.0)],
            ["| 0.200 | 0.300 | 1.50 |"],
            "give 1.50 of the measured ratio: they are too pessimistic",
        ),
        (
            [_checked(0.4, 2.0, 0.1, 1.0), _checked(0.4, 2.0, 0.3, 1.0)],
            ["| 0.200 | 0.100 | 0.50 |", "| 0.200 | 0.300 | 1.50 |"],
            "give between 0.50 and 1.50 of the measured ratio: they err both ways",
        ),
    ],
    ids=["optimistic", "pessimistic", "both"],
)
def test_the_check_tells_how_far_the_ratio_is_off(
    checked: list[dict[str, Any]], cells: list[str], says: str
) -> None:
    """Whatever was measured, the page says what the formulas are worth."""
    where = {"cpu": "c", "platform": "l", "cores": 2, "python": "3", "versions": {}}
    data = paper_table.run(None) | {"checked": checked}
    text = page(report.found("model", ["model"], where, False, data))
    assert all(cell in text for cell in cells) and says in text


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"kind": "other"}')
    with pytest.raises(ValueError, match=r"x\.json: not written by leyline\.proof"):
        report.render(file)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"x\.json: no JSON"):
        report.render(file)
    with pytest.raises(SystemExit, match="no engine 'nobody'; there are"):
        main(["peers", "--out", str(tmp_path), "--only", "nobody"])
    with pytest.raises(SystemExit, match=r"growth: .* is no file"):
        main(["model", "--out", str(tmp_path), "--growth", str(tmp_path / "none")])
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


def test_answer_is_plain() -> None:
    with pytest.raises(RuntimeError, match="30 of 100 tokens"):
        peers._expect_cold(PEERS[0], Answer(1.0, 100, 70))


# -- the GPU script ---------------------------------------------------------------------------


def _script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/gpu_splice.py"), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_gpu_script_on_a_small_model(tmp_path: Path) -> None:
    file = tmp_path / "splice.json"
    done = _script("--tiny", "--device", "cpu", "--repeats", "2", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    sizes = [(t["conversation"], t["way"]) for t in found["timings"]]
    assert sizes == [(n, way) for n in (256, 512) for way in ("moved", "copied")]
    for timing in found["timings"]:
        assert timing["computed"] == [7 + 11] * 2
        assert timing["kept"] == timing["conversation"] - 60
        pairs = zip(timing["splice_s"], timing["prefill_s"], strict=True)
        assert math.isclose(timing["ratio"], float(np.median([a / b for a, b in pairs])))
    assert [row["rows"] for row in found["rows"]] == [196, 452] and not found["skipped"]


def test_gpu_script_builds_the_published_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parameters as the model on paper has, and rows of 576 columns in 27 layers."""
    from leyline.layout import layout_of

    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu_splice

    model = gpu_splice.build(tiny=False, device="meta")
    facts = paper_table._facts(deepseek_v2_lite())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(facts["parameters"], 1e-4)
    assert layout_of(model).row_elements == 27 * 576


def test_gpu_script_warms_up_with_what_the_engine_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sizes below the usual one of the warm-up."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu_splice

    assert min(gpu_splice.SIZES) > gpu_splice.WARM_UP > 2048 + gpu_splice.ROOM
    monkeypatch.setattr(gpu_splice, "TINY_WARM_UP", gpu_splice.WARM_UP)
    file = tmp_path / "splice.json"
    given = ["--tiny", "--device", "cpu", "--repeats", "1", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["gpu_splice.py", *given, "--sizes", "256", "128"])
    assert gpu_splice.main() == 0
    found = json.loads(file.read_text())
    assert [t["conversation"] for t in found["timings"]] == [128, 128, 256, 256]


def test_gpu_script_tells_what_it_skipped(tmp_path: Path) -> None:
    file = tmp_path / "splice.json"
    done = _script("--tiny", "--device", "cpu", "--budget", "1", "--json", str(file))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("skipped: ") == 4
    assert len(json.loads(file.read_text())["skipped"]) == 4

"""What the benchmark returns: structure and counts, never times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyline.bench.row import Row
from leyline.bench.splice import Sizes
from leyline.sglang.bench import ahead, edit, host, recorded, run, throughput
from leyline.sglang.bench.server import Server
from leyline.traces import Session

pytestmark = pytest.mark.sglang

SIZES = Sizes(conversation=300, start=40, span=90, stub=7, new=11)
TOKENS = np.random.default_rng(3).integers(3, 500, 2000)


@pytest.fixture(autouse=True)
def tiny_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They start fast, and don't spin for what a tiny model has to compute."""
    monkeypatch.setenv("LEYLINE_CPU_FORK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def named(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


def test_edit_computes_stub_and_new_tokens_in_two_passes(checkpoint: Callable[..., Path]) -> None:
    """Moved or copied (I4); a plain request in the same server computes all behind the edit."""
    model = checkpoint("gqa")
    with Server(model, ("--max-total-tokens", "4000"), watched=True) as server:
        rows = named(edit.run(server, TOKENS, SIZES, repeats=2, vocab_size=500))
        before = server.seen()
        whole = edit.timed(server, TOKENS[1000:1200])
    for way in ("moved", "copied"):
        assert rows[f"edit.{way}.computed"].details["prefilled"] == [18, 18]
        assert rows[f"edit.{way}.computed"].details["reported"] == [18, 18]
        assert rows[f"edit.{way}.passes"].details["passes"] == [2, 2]
        assert len(rows[f"edit.{way}"].details["pairs"]) == 2
        assert all(ms > 0 for ms in rows[f"edit.{way}"].details["splice_ms"])
        assert rows[f"edit.{way}.without_attention"].value > 0
    assert len(rows) == 8 and before.passes > 0
    assert (whole.seen.passes, whole.seen.tokens) == (1, 200)
    assert 0 < whole.without_attention < whole.answer.seconds


def test_edits_that_were_not_spliced_are_no_result() -> None:
    seen = edit.Seen(1, 18, 0.1)
    report = {"copied": True, "tokens": {"computed": 18}, "splice_ms": 1.0}
    timed = edit.Timed(edit.Answer(1.0, 300, 200, report), seen)
    with pytest.raises(RuntimeError, match="meant to be moved"):
        edit._rows([(timed, timed)], "moved", SIZES)


def test_an_edit_made_ahead_leaves_only_new_tokens(checkpoint: Callable[..., Path]) -> None:
    """Brought along, the same one costs its stub and what is repaired too."""
    with Server(checkpoint("gqa"), ("--max-total-tokens", "6000"), watched=True) as server:
        sizes = Sizes(conversation=900, start=40, span=90, stub=7, new=11)
        rows = named(ahead.run(server, TOKENS, sizes, repeats=2, vocab_size=500))
    assert list(rows) == [
        f"ahead.{way}{rest}" for way in ("replace", "repair") for rest in ("", ".computed")
    ]
    for way, repaired in (("replace", 0), ("repair", ahead.REPAIRED)):
        counts = rows[f"ahead.{way}.computed"]
        assert counts.details["ahead"] == [11, 11] and counts.met
        assert counts.details["along"] == [18 + repaired] * 2
        assert len(rows[f"ahead.{way}"].details["pairs"]) == 2


def test_throughput_has_a_row_before_and_one_after_a_session(
    checkpoint: Callable[..., Path],
) -> None:
    model = checkpoint("gqa")
    load = throughput.Load(clients=3, requests=2, prompt=20, new=3)
    slots = ("--max-total-tokens", "4000")
    with Server(model, slots) as ours, Server(model, slots, plugin=False) as alone:
        rows = named(throughput.run(ours, alone, load, repeats=2, vocab_size=500))
        assert ours.generate(TOKENS[:20], session="x").report
        assert alone.generate(TOKENS[:20], session="x").report is None, "the plugin is out"
    assert list(rows) == ["throughput.unused", "throughput.used"]
    assert all(row.at_least == 0.98 and len(row.details["pairs"]) == 2 for row in rows.values())


@pytest.mark.parametrize("name", [each.name for each in host.EDITS])
def test_host_keeps_all_rows_it_says(name: str, checkpoint: Callable[..., Path]) -> None:
    """It raises where rows are missing, so a time is the time of a whole splice."""
    host.settle(checkpoint("mla"))
    (each,) = [each for each in host.EDITS if each.name == name]
    rng = np.random.default_rng(0)
    cache = host.make_cache(each.page)
    assert all(host.splice_once(cache, each, rng, str(i)) > 0 for i in range(2))
    source, target = each.prompts(rng)
    assert len(target) - len(source) == each.n * (each.stub - each.span) + each.new


def test_host_rows(checkpoint: Callable[..., Path]) -> None:
    rows = named(host.run(checkpoint("mla"), repeats=3))
    assert len(rows) == 2 * len(host.EDITS)
    assert rows["host.replaced"].at_most == 5e-3 and rows["host.replaced.p95"].met is None
    assert all(len(rows[f"host.{e.name}"].details["seconds"]) == 3 for e in host.EDITS)


def _session(name: str) -> Session:
    rng = np.random.default_rng(len(name))
    text = ["".join(chr(97 + c) for c in rng.integers(0, 26, 120)) for _ in range(9)]
    roles = ["user", *["assistant", "tool"] * 3, "assistant"]
    messages = [{"role": role, "content": t} for role, t in zip(roles, text, strict=False)]
    return Session(name, tuple(messages), ())


def test_recorded_sessions_are_cached_as_in_the_embedded_engine(tmp_path: Path) -> None:
    from checkpoints import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = recorded.write_tiny(tmp_path / "tiny", tokenizer)
    with Server(model, recorded.FLAGS) as server:
        rows = named(recorded.run(server, tokenizer, [_session("a"), _session("bb")], keep=1))
    assert list(rows) == ["recorded.prefix", "recorded.leyline", "recorded.embedded"]
    assert rows["recorded.leyline"].value > rows["recorded.prefix"].value
    assert rows["recorded.leyline"].details["fallbacks"] == 0
    assert rows["recorded.embedded"].met, rows["recorded.embedded"]


def test_results_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def one(bed: Any, options: Any, say: Any) -> list[Row]:
        raise AssertionError("not chosen")

    def two(bed: Any, options: Any, say: Any) -> list[Row]:
        say("half way")
        return [Row("two.x", "what", 0.5, at_most=0.4)]

    monkeypatch.setattr(run, "MEASUREMENTS", {"one": one, "two": two})
    said: list[tuple[str, str]] = []
    options = run.Options(tmp_path, only=("two",), quick=True)
    results = run.run(options, lambda name, text: said.append((name, text)))
    assert said == [("two", ""), ("two", "half way")]
    value = json.loads(json.dumps(results.as_json()))
    assert value["rows"][0]["met"] is False and value["quick"] is True
    assert value["machine"]["versions"]["sglang"]

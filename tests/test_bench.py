"""What the benchmark returns: structure and counts, never times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bytes_tokenizer import bytes_tokenizer
from leyline.bench import ahead, decode, hitrate, overhead, prefill, run, splice
from leyline.bench.row import Row
from leyline.engine.engine import Config, Engine
from leyline.tiny import tiny_model
from leyline.traces import Session

SIZES = splice.Sizes(conversation=300, start=40, span=90, stub=7, new=11)
TOKENS = np.random.default_rng(3).integers(3, 512, 2000)


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine(tiny_model("llama"), None, Config(memory_gib=0.05), "tiny") as engine:
        yield engine


@pytest.mark.parametrize(
    ("value", "at_least", "at_most", "met", "goal"),
    [
        (0.5, None, None, None, ""),
        (0.5, 0.5, None, True, "≥ 0.500"),
        (0.49, 0.5, None, False, "≥ 0.500"),
        (0.5, None, 0.5, True, "≤ 0.500"),
        (0.51, None, 0.5, False, "≤ 0.500"),
        (1.0, 1.0, 1.0, True, "1.00"),
        (1.001, 1.0, 1.0, False, "1.00"),
        (1.02, 0.98, 1.02, True, "0.980 … 1.02"),
    ],
)
def test_goals(
    value: float, at_least: float | None, at_most: float | None, met: bool | None, goal: str
) -> None:
    row = Row("a", "b", value, at_least=at_least, at_most=at_most)
    assert row.met is met and row.goal == goal


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [("tokens", 70, "70 tokens"), ("share", 0.8931, "89.3%"), ("s", 0.0123, "12.3 ms")],
)
def test_units(unit: Any, value: float, text: str) -> None:
    assert Row("a", "b", value, unit=unit).show(value) == text


def test_splice_computes_stub_and_new_tokens(engine: Engine) -> None:
    """Moved or copied, none more than these (I4); no second copy when moved (I7)."""
    rows = {row.name: row for row in splice.run(engine, TOKENS, SIZES, repeats=2)}
    for way in ("moved", "copied"):
        assert rows[f"splice.replace.{way}.computed"].value == 7 + 11
        assert rows[f"splice.delete.{way}.computed"].value == 11
        assert rows[f"splice.replace.{way}"].at_most == 0.08
        assert rows[f"splice.delete.{way}"].at_most == 0.06
        assert len(rows[f"splice.delete.{way}"].details["pairs"]) == 2
    assert len(rows) == 8
    slots = splice.slots(engine, TOKENS, SIZES)
    assert slots.met and slots.value == 1.0
    assert slots.details == {"before": 300, "after": 300, "moved": 300 - 40 - 90}


def test_prefill_and_decode_rows(engine: Engine) -> None:
    bare = tiny_model("llama")
    rows = prefill.run(engine, bare, TOKENS, (50, 120), repeats=1)
    assert [row.name for row in rows] == ["prefill.50", "prefill.120"]
    rows = decode.run(engine, bare, TOKENS, (30, 60), new=5, repeats=1, batch=4)
    assert [row.name for row in rows] == ["decode.30", "decode.60", "decode.batch4"]
    assert all(row.value > 0 and row.details["pairs"] for row in rows)


def test_an_edit_made_ahead_leaves_the_new_tokens(engine: Engine) -> None:
    rows = {row.name: row for row in ahead.run(engine, TOKENS, SIZES, repeats=2)}
    for name in ("replace", "repair"):
        assert rows[f"ahead.{name}.computed"].value == 11
        assert rows[f"ahead.{name}"].at_most == 1.0
        assert len(rows[f"ahead.{name}"].details["pairs"]) == 2


def test_switched_off_engine_splices_nothing(engine: Engine) -> None:
    """The other side of I1's cost: same weights, no directives."""
    with overhead.switched_off(engine) as off:
        assert not off.config.directives and off.model is engine.model
        rows = overhead.run(engine, off, TOKENS[:40], new=3, repeats=2)
    assert len(rows) == 1 and len(rows[0].details["pairs"]) == 2
    assert (rows[0].at_least, rows[0].at_most) == (0.98, 1.02)


def _session(name: str) -> Session:
    rng = np.random.default_rng(len(name))
    text = ["".join(chr(97 + c) for c in rng.integers(0, 26, 120)) for _ in range(9)]
    roles = ["user", *["assistant", "tool"] * 3, "assistant"]
    messages = [{"role": role, "content": t} for role, t in zip(roles, text, strict=False)]
    return Session(name, tuple(messages), ())


def test_hit_rates_add_up() -> None:
    with hitrate.tiny_engine(bytes_tokenizer()) as engine:
        prefix, leyline = hitrate.run(engine, [_session("a"), _session("bb")], keep=1)
        assert engine.max_tokens > 8192
    assert (prefix.name, leyline.name) == ("hitrate.prefix", "hitrate.leyline")
    assert prefix.met is None and leyline.at_least == 0.89
    assert prefix.details["prompt_tokens"] == leyline.details["prompt_tokens"]
    for row in (prefix, leyline):
        found = row.details
        assert found["cached_tokens"] + found["computed_tokens"] == found["prompt_tokens"]
        assert row.value == found["cached_tokens"] / found["prompt_tokens"]
        assert found["calls"] == 8 and found["fallbacks"] == 0
    assert prefix.details["edits"] == 0 and leyline.details["edits"] == 4
    assert leyline.value > prefix.value


def test_hit_rates_of_the_shipped_sessions(smollm2: Path) -> None:
    """On the shortest of them: 6 calls; the whole count is what `leyline bench` does."""
    from transformers import AutoTokenizer

    from leyline.traces import load_traces

    session = min(load_traces(), key=lambda session: len(session.messages))
    with hitrate.tiny_engine(AutoTokenizer.from_pretrained(smollm2)) as engine:
        prefix, leyline = hitrate.run(engine, [session])
    assert prefix.details["calls"] == 6
    assert prefix.value == pytest.approx(0.6415, abs=1e-3)
    assert leyline.value > prefix.value + 0.08


def test_results_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = Row("two.x", "what", 0.5, at_most=0.4, details={"pairs": [(1.0, 2.0)]})
    measured: list[str] = []

    def one(bed: Any, options: Any, say: Any) -> list[Row]:
        measured.append("one")
        return []

    def two(bed: Any, options: Any, say: Any) -> list[Row]:
        say("half way")
        measured.append("two")
        assert bed.repeats == (1 if options.quick else 3)
        return [row]

    monkeypatch.setattr(run, "MEASUREMENTS", {"one": one, "two": two})
    said: list[tuple[str, str]] = []
    options = run.Options(tmp_path, only=("two",), quick=True)
    results = run.run(options, lambda name, text: said.append((name, text)))
    assert measured == ["two"] and said == [("two", ""), ("two", "half way")]
    value = json.loads(json.dumps(results.as_json()))
    assert value["rows"] == [
        {
            "name": "two.x",
            "what": "what",
            "value": 0.5,
            "shown": "0.500",
            "unit": "ratio",
            "goal": "≤ 0.400",
            "met": False,
            "details": {"pairs": [[1.0, 2.0]]},
        }
    ]
    assert value["machine"]["cores"] >= 1 and value["machine"]["versions"]["torch"]
    run.run(run.Options(tmp_path))
    assert measured == ["two", "one", "two"]


def test_diff_rows_are_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    from leyline.bench import diff

    def fake(repeats: int) -> list[diff.DiffRow]:
        return [
            diff.DiffRow(f"{kind}{i}", size, size, 1, size, None, seconds * (i + 1), goal)
            for size, realistic in diff.SIZES.items()
            for kind, goal in (("r", realistic), ("h", realistic * diff.HOSTILE_FACTOR))
            for i, seconds in enumerate((0.01, 0.02, 0.001))
        ]

    monkeypatch.setattr(diff, "run", fake)
    rows = run._diff(None, run.Options(Path()), lambda text: None)  # type: ignore[arg-type]
    names = [
        "diff.128k.realistic",
        "diff.128k.hostile",
        "diff.1000k.realistic",
        "diff.1000k.hostile",
    ]
    assert [row.name for row in rows] == names
    assert all(row.value == 0.04 and len(row.details) == 3 for row in rows)
    assert [row.at_most for row in rows] == [0.05, 0.5, 1.0, 10.0]


def test_rotate_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from leyline.bench import rotate

    small = rotate.Shape("small", 2, 2, 16, 32, False)
    real = rotate.run
    monkeypatch.setattr(rotate, "run", lambda repeats: real(1, (small,)))
    rows = run._rotate(None, run.Options(Path()), lambda text: None)  # type: ignore[arg-type]
    goals = {row.name: row.at_least for row in rows}
    assert goals["rotate.in_place"] == goals["rotate.move"] == 0.5
    assert goals["rotate.in_place_scattered_slots"] is None
    assert all(row.value > 0 for row in rows)

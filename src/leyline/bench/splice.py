"""An edit near the start of a long conversation: splice against re-prefill, on one engine.

Every request edits one token further on, so that none finds the rows that another one computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from leyline.bench.row import Row
from leyline.bench.timing import first_token, paired, prefill

if TYPE_CHECKING:
    from leyline.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens. start: where the edited span begins."""

    conversation: int = 6000
    start: int = 200
    span: int = 500
    stub: int = 20
    new: int = 50


GOALS = {"replace": 0.08, "delete": 0.06}
"""For each kind of edit."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One repetition: a source, and what splice and re-prefill make of it."""

    source: np.ndarray
    spliced: np.ndarray
    whole: np.ndarray


def run(
    engine: Engine,
    tokens: np.ndarray,
    sizes: Sizes,
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
    kinds: Iterable[str] = GOALS,
) -> list[Row]:
    """tokens: a conversation, at least `sizes.conversation` long. kinds: of edits, "replace" and
    "delete". The engine's cache is emptied."""
    rows = []
    for kind in kinds:
        stub = sizes.stub if kind == "replace" else 0
        source = tokens[: sizes.conversation]
        targets = [edited(source, sizes, stub, i, engine.vocab_size) for i in range(2 * repeats)]
        cases = [_Case(source, *targets[i : i + 2]) for i in range(0, 2 * repeats, 2)]
        for way, measure in (("moved", _moved), ("copied", _copied)):
            say(f"{kind}, rows {way}")
            engine.reset()
            rows += measure(engine, cases, kind, sizes, stub)
    return rows


def edited(source: np.ndarray, sizes: Sizes, stub: int, i: int, vocab: int) -> np.ndarray:
    """The source with its span, `i` tokens further on, replaced by `stub` tokens, and new ones."""
    start, end = sizes.start + i, sizes.start + i + sizes.span
    rng = np.random.default_rng(i)
    cut = [source[:start], rng.integers(0, vocab, stub), source[end:]]
    return np.concatenate([*cut, rng.integers(0, vocab, sizes.new)])


def _moved(engine: Engine, cases: list[_Case], kind: str, sizes: Sizes, stub: int) -> list[Row]:
    """The session is the only user of its rows. Each splice is undone by another one."""
    from leyline.channel import Channel

    session = Channel("bench")
    pairs, reports = [], []
    prefill(engine, cases[0].source, session)
    for case in cases:
        spliced, report = first_token(engine, case.spliced, session)
        whole, _ = first_token(engine, case.whole)
        pairs.append((spliced, whole))
        reports.append(report)
        prefill(engine, case.source, session)
    return _rows("moved", kind, pairs, reports, sizes, stub)


def _copied(engine: Engine, cases: list[_Case], kind: str, sizes: Sizes, stub: int) -> list[Row]:
    """Others use the same rows, so they have to stay."""
    from leyline.channel import Channel

    pairs, reports = [], []
    prefill(engine, cases[0].source)
    for i, case in enumerate(cases):
        session = Channel(f"bench-{i}")
        prefill(engine, case.source, session)
        spliced, report = first_token(engine, case.spliced, session)
        whole, _ = first_token(engine, case.whole)
        pairs.append((spliced, whole))
        reports.append(report)
        engine.drop_session("", session.session)
    return _rows("copied", kind, pairs, reports, sizes, stub)


def _rows(
    way: str, kind: str, pairs: list[tuple[float, float]], reports: list, sizes: Sizes, stub: int
) -> list[Row]:
    spliced, whole, ratio = paired(pairs)
    if any(not report.moved or report.copied != (way == "copied") for report in reports):
        raise RuntimeError(f"rows were meant to be {way}, but were not")
    done = f"{sizes.span} tokens of {sizes.conversation} {'replaced' if stub else 'deleted'}"
    computed = max(report.computed for report in reports)
    expected = stub + sizes.new
    details = {
        "splice_ttft_s": spliced,
        "prefill_ttft_s": whole,
        "pairs": pairs,
        "splice_ms": [report.splice_ms for report in reports],
    }
    return [
        Row(
            f"splice.{kind}.{way}",
            f"time to first token, splice / re-prefill: {done}, rows {way}",
            ratio,
            at_most=GOALS[kind],
            details=details,
        ),
        Row(
            f"splice.{kind}.{way}.computed",
            f"tokens computed by that splice ({stub} stub + {sizes.new} new)",
            computed,
            unit="tokens",
            at_most=expected,
        ),
    ]


def slots(engine: Engine, tokens: np.ndarray, sizes: Sizes) -> Row:
    """An edit that keeps the length: as many rows as before, unless there is a second copy. The
    engine's cache is emptied."""
    from leyline.channel import Channel

    engine.reset()
    session = Channel("slots")
    source = tokens[: sizes.conversation]
    target = edited(source, sizes, sizes.span - sizes.new, 0, engine.vocab_size)
    prefill(engine, source, session)
    before = engine.stats()
    report = prefill(engine, target, session)
    after = engine.stats()
    used = [stats.capacity - stats.free for stats in (before, after)]
    return Row(
        "splice.slots",
        "slots used after a move / before",
        used[1] / used[0],
        at_least=1.0,
        at_most=1.0,
        details={"before": used[0], "after": used[1], "moved": report.moved},
    )

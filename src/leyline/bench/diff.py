"""How long `derive_edits` takes: realistic edits, and inputs made to be slow."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

from ..diff import derive_edits
from ..directive import Directive, Edits

SIZES = {128_000: 0.05, 1_000_000: 1.0}
"""Tokens of the source, and the goal in seconds with realistic edits on one core."""
HOSTILE_FACTOR = 10
"""Hostile inputs may take this much longer."""
VOCAB = 50_000


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One input. `seconds` is the median, `kept` counts tokens not in any edit.

    `attainable`: tokens that a perfect diff keeps, where the input was made by known edits.
    """

    name: str
    source_tokens: int
    target_tokens: int
    edits: int
    kept: int
    attainable: int | None
    seconds: float
    goal_s: float

    @property
    def met(self) -> bool:
        return self.seconds <= self.goal_s


def run(repeats: int = 5, seed: int = 0) -> list[DiffRow]:
    """Rows for every size and input. Checks that each result gives the target."""
    rows = []
    for size, goal in SIZES.items():
        rng = np.random.default_rng(seed)
        for name, source, target, attainable in _realistic(rng, size):
            rows.append(_measure(name, source, target, attainable, repeats, goal))
        for name, source, target in _hostile(rng, size):
            rows.append(_measure(name, source, target, None, repeats, HOSTILE_FACTOR * goal))
    return rows


def _measure(
    name: str,
    source: np.ndarray,
    target: np.ndarray,
    attainable: int | None,
    repeats: int,
    goal: float,
) -> DiffRow:
    seconds = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        edits = derive_edits(source, target)
        seconds.append(time.perf_counter() - start)
    if not np.array_equal(edits.apply(source), target):
        raise AssertionError(f"derive_edits gave another target for {name!r}")
    kept = len(source) - sum(edit.end - edit.start for edit in edits)
    return DiffRow(
        name, len(source), len(target), len(edits), kept, attainable, median(seconds), goal
    )


Known = tuple[str, np.ndarray, np.ndarray, int | None]


def _realistic(rng: np.random.Generator, size: int) -> Iterator[Known]:
    """20 spans replaced by one stub, or edited at random; text with the repetition of a chat."""
    text = _chat(rng, size)
    starts = np.sort(rng.choice(size // 1000 - 1, 20, replace=False)) * 1000 + 100
    stub = tuple(rng.integers(0, VOCAB, 20).tolist())
    spans = [Directive(int(s), int(s) + 500, stub) for s in starts]
    yield _known("20 spans replaced by a stub", text, spans)
    spans = []
    for s in starts.tolist():
        new = tuple(rng.integers(0, VOCAB, int(rng.integers(1, 400))).tolist())
        spans.append(Directive(s, s + int(rng.integers(0, 700)), new))
    yield _known("20 spans changed", text, spans)


def _known(name: str, source: np.ndarray, spans: list[Directive]) -> Known:
    kept = len(source) - sum(span.end - span.start for span in spans)
    return name, source, Edits.of(spans, len(source)).apply(source), kept


def _chat(rng: np.random.Generator, size: int) -> np.ndarray:
    """Tokens of Zipf-like frequency, with one of 8 boilerplate blocks about every 300 tokens."""
    text = np.minimum(rng.zipf(1.2, size), VOCAB - 1)
    blocks = rng.integers(0, VOCAB, (8, 40))
    for at in range(0, size - 40, 300):
        text[at : at + 40] = blocks[rng.integers(8)]
    return text


def _hostile(rng: np.random.Generator, size: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    same = np.full(size, 7)
    yield "all equal, one token changed", same, np.where(np.arange(size) == size // 2, 8, 7)
    ends = rng.integers(0, VOCAB, (4, 50))
    yield (
        "all equal between other ends",
        np.concatenate([ends[0], same, ends[1]]),
        np.concatenate([ends[2], same[: size // 2], ends[3]]),
    )
    period = np.resize(rng.integers(0, VOCAB, 37), size)
    yield (
        "periodic, another phase and length",
        np.concatenate([ends[0], period, ends[1]]),
        np.concatenate([ends[2], period[11 : size - size // 3], ends[3]]),
    )
    scattered = period.copy()
    scattered[rng.choice(size, size // 200, replace=False)] = VOCAB
    yield "periodic, every 200th token changed", period, scattered
    text = rng.integers(0, VOCAB, size)
    yield "nothing in common", text, text + VOCAB
    for symbols in (2, 4):
        one, other = rng.integers(0, symbols, (2, size))
        yield f"random over {symbols} symbols", one, other
    blocks = text[: size // 24 * 24].reshape(-1, 24)
    yield "blocks of 24 shuffled", text, rng.permutation(blocks).reshape(-1)
    yield "halves exchanged", text, np.roll(text, size // 2)
    yield "reversed", text, text[::-1].copy()
    changed = text.copy()
    changed[::40] = VOCAB
    yield "every 40th token changed", text, changed

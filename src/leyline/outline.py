"""What a prompt is made of, token by token: for people who look at what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from leyline.directive import Edits, Mode
from leyline.plan import Compute, Plan


class Kind(StrEnum):
    """Where the rows of a part of the prompt came from."""

    SHARED = "shared"
    """The cache, as they lay."""
    MOVED = "moved"
    """The session's rows behind an edit, turned in place."""
    COPIED = "copied"
    """The same, but copied, as somebody else uses the source."""
    REPAIRED = "repaired"
    """Computed again because of `repair`, though the text is as it was."""
    COMPUTED = "computed"
    """Computed as they were not cached."""


@dataclass(frozen=True, slots=True)
class Part:
    """Prompt tokens `[start, start + n)`. source: where moved rows lay in the session's tokens."""

    kind: Kind
    start: int
    n: int
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Evicted:
    """Tokens `[start, start + n)` of the session's sequence, which the prompt has no more.

    at: prompt position where their replacement, of `replacement` tokens, begins.
    tokens: their ids, int64 `[n]`; None where they were to be forgotten.
    """

    at: int
    start: int
    n: int
    replacement: int
    mode: Mode
    tokens: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """A prompt from its first token to its last.

    tokens: the prompt, int64 `[n]`. parts: they cover it once, in order. evicted: in order, too.
    source: tokens of the session's sequence that it was compared with; None if there was none.
    reprefill: tokens that a prefix cache without edits would have computed.
    """

    tokens: np.ndarray
    parts: tuple[Part, ...]
    evicted: tuple[Evicted, ...] = ()
    source: int | None = None
    reprefill: int = 0


def parts_of(
    plan: Plan, shared: int, copied: bool, redone: Sequence[tuple[int, int]] = ()
) -> tuple[Part, ...]:
    """A plan's segments by kind. shared: leading rows taken as they lie. redone: ranges
    `(start, end)` of the prompt that a REPAIR computes again, in order."""
    parts: list[Part] = []
    for s in plan.segments:
        if isinstance(s, Compute):
            parts += _split(s, redone)
        elif s.dst < shared:
            parts.append(Part(Kind.SHARED, s.dst, s.n))
        else:
            parts.append(Part(Kind.COPIED if copied else Kind.MOVED, s.dst, s.n, s.src))
    return tuple(parts)


def redone_by(edits: Edits) -> tuple[tuple[int, int], ...]:
    """Ranges `(start, end)` of the target that the edits' REPAIRs compute again, in order; the
    counting is `make_plan`'s. Empty where something is forgotten: then all is computed."""
    if any(edit.mode == Mode.FORGET for edit in edits):
        return ()
    return tuple(_redone(edits))


def evicted_by(edits: Edits, source: np.ndarray, forget: bool) -> tuple[Evicted, ...]:
    """What the edits take out of the source, int64 tokens. forget: their ids are left out."""
    found, shift = [], 0
    for edit in edits:
        if edit.end > edit.start:
            mode = Mode.FORGET if forget else edit.mode
            tokens = None if forget else source[edit.start : edit.end].copy()
            n, new = edit.end - edit.start, len(edit.replacement)
            found.append(Evicted(edit.start + shift, edit.start, n, new, mode, tokens))
        shift += edit.shift
    return tuple(found)


def _redone(edits: Edits) -> Iterator[tuple[int, int]]:
    at = target = repair = 0
    for edit in edits:
        redo = min(repair, edit.start - at)
        if redo:
            yield target, target + redo
        repair -= redo
        if edit.mode == Mode.REPAIR:
            repair = max(repair, edit.repair)
        target += edit.start - at + len(edit.replacement)
        at = edit.end
    redo = min(repair, edits.source_length - at)
    if redo:
        yield target, target + redo


def _split(computed: Compute, redone: Sequence[tuple[int, int]]) -> Iterator[Part]:
    at, end = computed.dst, computed.dst + computed.n
    for start, stop in redone:
        start, stop = max(start, at), min(stop, end)
        if start >= stop:
            continue
        if start > at:
            yield Part(Kind.COMPUTED, at, start - at)
        yield Part(Kind.REPAIRED, start, stop - start)
        at = stop
    if at < end:
        yield Part(Kind.COMPUTED, at, end - at)

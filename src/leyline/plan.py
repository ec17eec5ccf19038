"""Plans: the target cut into rows to keep and rows to compute. No engine, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .directive import Edits, Mode


@dataclass(frozen=True, slots=True)
class Keep:
    """Source rows `[src, src+n)` become target rows `[dst, dst+n)`."""

    src: int
    dst: int
    n: int

    @property
    def shift(self) -> int:
        """Positions to rotate by."""
        return self.dst - self.src


@dataclass(frozen=True, slots=True)
class Compute:
    """Target rows `[dst, dst+n)` are to be prefilled."""

    dst: int
    n: int


Segment = Keep | Compute


@dataclass(frozen=True)
class Plan:
    """Segments cover `[0, target_length)` once, in order.

    `amortized_from` is the first target row that a fresh prefill would give otherwise
    (`target_length` if there is none): a kept row behind an edit, or one amortized before.
    Rows computed behind it have read it, so they are amortized too.
    """

    segments: tuple[Segment, ...]
    target_length: int
    amortized_from: int

    @property
    def shared(self) -> int:
        """Tokens before the first edit whose rows stay where they are."""
        return _shared(self.segments)

    @property
    def moved(self) -> int:
        """Kept tokens behind an edit, even where the shift is 0."""
        return sum(keep.n for keep in self.keeps) - self.shared

    @property
    def computed(self) -> int:
        return sum(compute.n for compute in self.computes)

    @property
    def keeps(self) -> tuple[Keep, ...]:
        return tuple(s for s in self.segments if isinstance(s, Keep))

    @property
    def computes(self) -> tuple[Compute, ...]:
        return tuple(s for s in self.segments if isinstance(s, Compute))


def make_plan(edits: Edits, *, available: int | None = None, exact: int | None = None) -> Plan:
    """How to come from the source's rows to the target's.

    `available`: only source rows `[0, available)` still exist (default: all).
    `exact`: source rows from here on are amortized already (default: none).

    The last target token is always computed, its logits are needed. With a FORGET edit nothing
    behind any edit and no amortized row is kept: the result is that of a fresh engine. REPAIR(w)
    computes the first w tokens that would be kept behind it, whatever edits follow in between.
    """
    available = _clamped(available, edits.source_length, "available")
    exact = _clamped(exact, edits.source_length, "exact")
    if any(edit.mode == Mode.FORGET for edit in edits):
        available = min(available, exact, edits[0].start)

    cut = _Cut()
    at, repair = 0, 0
    for edit in edits:
        repair = cut.keep(at, edit.start, available, repair)
        cut.compute(len(edit.replacement))
        if edit.mode == Mode.REPAIR:
            repair = max(repair, edit.repair)
        at = edit.end
    cut.keep(at, edits.source_length, available, repair)
    cut.compute_last()
    segments = tuple(cut.segments)
    return Plan(segments, cut.length, _amortized_from(segments, cut.length, exact))


class _Cut:
    """Segments appended one by one."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.length = 0

    def keep(self, start: int, end: int, available: int, repair: int) -> int:
        """Source tokens `[start, end)`, the first `repair` computed; returns what is left of it."""
        redo = min(repair, end - start)
        self.compute(redo)
        kept = max(0, min(end, available) - (start + redo))
        if kept:
            self.segments.append(Keep(start + redo, self.length, kept))
            self.length += kept
        self.compute(end - start - redo - kept)
        return repair - redo

    def compute(self, n: int) -> None:
        if not n:
            return
        last = self.segments[-1] if self.segments else None
        if isinstance(last, Compute):
            self.segments[-1] = Compute(last.dst, last.n + n)
        else:
            self.segments.append(Compute(self.length, n))
        self.length += n

    def compute_last(self) -> None:
        last = self.segments[-1] if self.segments else None
        if not isinstance(last, Keep):
            return
        self.segments.pop()
        self.length -= last.n
        if last.n > 1:
            self.segments.append(Keep(last.src, last.dst, last.n - 1))
            self.length += last.n - 1
        self.compute(1)


def _shared(segments: tuple[Segment, ...]) -> int:
    first = segments[0] if segments else None
    # Behind an edit nothing stays at row 0: a deletion moves it, an insertion comes before it.
    return first.n if isinstance(first, Keep) and first.src == first.dst == 0 else 0


def _amortized_from(segments: tuple[Segment, ...], length: int, exact: int) -> int:
    shared = _shared(segments)
    if shared > exact:
        return exact
    behind = (s.dst for s in segments if isinstance(s, Keep) and s.dst >= shared)
    return next(behind, length)


def _clamped(value: int | None, length: int, name: str) -> int:
    if value is None:
        return length
    if value < 0:
        raise ValueError(f"{name} is {value}; it counts source rows, so it is at least 0")
    return min(value, length)

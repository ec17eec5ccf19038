"""Which cached rows a prompt takes, decided from counts alone: no engine, no torch.

An engine says how many tokens of the prompt it finds as exact rows of anybody, and how many of the
session's own sequence it still holds. Out comes the plan that it executes.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

import numpy as np

from leyline.channel import Channel, EditReport, EngineError, Fallback
from leyline.diff import derive_edits
from leyline.directive import Edits, Mode
from leyline.lineage import Lineage, Span, spans_after
from leyline.plan import Compute, Keep, Plan, Segment, make_plan


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where a prompt's rows are to come from.

    plan: its first Keep, if at row 0, is rows `[0, shared)`, taken as they lie; further ones are
    the source's, moved or copied.
    from_source: the shared rows are the session's own, possibly amortized; else exact ones.
    fallback: why less is kept than the edits allow.
    """

    plan: Plan
    shared: int
    from_source: bool
    fallback: Fallback | None = None

    @property
    def moved(self) -> tuple[Keep, ...]:
        """The rows to move or copy."""
        return tuple(keep for keep in self.plan.keeps if keep.dst >= self.shared)


def edits_of(
    channel: Channel, source: np.ndarray, prompt: np.ndarray | None, vocab_size: int | None
) -> tuple[np.ndarray, Edits]:
    """The prompt, and the edits that lead to it from the session's source; int64 tokens.

    prompt: None only with explicit directives, which then make it. Raises DirectiveError for
    directives that don't fit the source, EngineError where they leave nothing of it.
    """
    mode = channel.mode
    if channel.directives is None:
        assert prompt is not None
        return prompt, derive_edits(source, prompt, mode=mode, repair=channel.repair)
    edits = Edits.of(channel.directives, len(source), vocab_size)
    edited = edits.apply(source)
    if prompt is None:
        if len(edited) == 0:
            raise EngineError("empty_prompt", "the directives leave nothing of the sequence")
        return edited, edits
    # What the directives leave open, new tokens above all, is derived as ever.
    rest = derive_edits(edited, prompt, mode=mode, repair=channel.repair)
    return prompt, edits.compose(rest)


def edit_reports(channel: Channel, edits: Edits) -> tuple[EditReport, ...]:
    """All edits but what is only new at the end."""
    return tuple(
        EditReport(
            e.start, e.end, len(e.replacement), e.shift, Mode.FORGET if channel.forgets else e.mode
        )
        for e in edits
        if e.start < edits.source_length
    )


def share_only(length: int, shared: int) -> Reuse:
    """Rows `[0, shared)` as they lie, the rest of `length` tokens computed."""
    segments: list[Segment] = [Keep(0, 0, shared)] if shared else []
    segments.append(Compute(shared, length - shared))
    return Reuse(Plan(tuple(segments), length, length), shared, from_source=False)


def reuse(
    edits: Edits,
    lineage: Lineage,
    *,
    exact: int,
    source: int,
    held: int | None = None,
    page: int = 1,
) -> Reuse:
    """The plan for a session's prompt.

    exact: tokens of the prompt found as exact rows; they are preferred, unless the source has more
    before the first edit. source: tokens of the lineage still cached; held: how many were, at most
    (default: all). page: rows are shared in whole pages; the rest of the last one before the first
    edit is copied.
    """
    plan = make_plan(edits, available=source, exact=lineage.exact)
    own = plan.shared // page * page
    from_source = exact < own
    shared = own if from_source else exact
    final = _behind(plan, shared, from_source, page)
    ideal = make_plan(edits, available=held, exact=lineage.exact)
    fallback = None
    if final.computed > _behind(ideal, shared, from_source, page).computed:
        fallback = Fallback.SOURCE_PARTLY_EVICTED if source else Fallback.SOURCE_MISSING
    return Reuse(final, shared, from_source, fallback)


def compute_instead(reuse: Reuse, those: Container[Keep]) -> Reuse:
    """The same, but these kept rows are computed."""
    segments: list[Segment] = []
    for s in reuse.plan.segments:
        s = Compute(s.dst, s.n) if s in those else s
        last = segments[-1] if segments else None
        if isinstance(s, Compute) and isinstance(last, Compute):
            segments[-1] = Compute(last.dst, last.n + s.n)
        else:
            segments.append(s)
    return replace(reuse, plan=replace(reuse.plan, segments=tuple(segments)))


def fewer_runs(reuse: Reuse, most: int) -> Reuse:
    """At most `most` runs of kept rows behind computed ones, the longest; what lies between them is
    computed. For engines that need a pass for each."""
    runs: list[list[Keep]] = []
    last: Segment | None = None
    for s in reuse.plan.segments:
        if isinstance(s, Keep) and isinstance(last, Compute):
            runs.append([s])
        elif isinstance(s, Keep) and runs:
            runs[-1].append(s)
        last = s
    if len(runs) <= most:
        return reuse
    runs.sort(key=lambda run: sum(keep.n for keep in run), reverse=True)
    return compute_instead(reuse, {keep for run in runs[most:] for keep in run})


def provenance(reuse: Reuse, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Where the prompt's rows come from; `spans` is the source's provenance."""
    plan = reuse.plan
    if reuse.from_source or not reuse.shared:
        return spans_after(plan, spans)
    # Somebody's exact rows: as good as computed, whatever the source's are.
    segments = (Compute(0, reuse.shared), *plan.segments[1:])
    return spans_after(replace(plan, segments=segments), spans)


def _behind(plan: Plan, n: int, from_source: bool, page: int) -> Plan:
    """`plan` with its first `n` rows taken as they lie: the source's own rows, or exact ones."""
    segments: list[Segment] = [Keep(0, 0, n)] if n else []
    for s in plan.segments:
        cut = max(0, n - s.dst)
        if cut >= s.n:
            continue
        if isinstance(s, Keep):
            segments.append(Keep(s.src + cut, s.dst + cut, s.n - cut))
        else:
            segments.append(Compute(s.dst + cut, s.n - cut))
    segments = _without_tail(segments, n, page)
    moved = (s.dst for s in segments if isinstance(s, Keep) and s.dst >= n)
    first = next(moved, plan.target_length)
    amortized = min(plan.amortized_from, first) if from_source else first
    return Plan(tuple(segments), plan.target_length, amortized)


def _without_tail(segments: list[Segment], n: int, page: int) -> list[Segment]:
    """Less than a page in place behind the shared rows isn't worth a copy of its own."""
    moved = [s for s in segments if isinstance(s, Keep) and s.dst >= n]
    if len(moved) != 1 or moved[0].shift or moved[0].dst != n or moved[0].n >= page:
        return segments
    at = segments.index(moved[0])
    rest = sum(s.n for s in segments[at:])
    return [*segments[:at], Compute(n, rest)]

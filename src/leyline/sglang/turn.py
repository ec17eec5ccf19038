"""One request of a session on its way through the scheduler: its plan, its key, how far it is.

A plan is carried out from front to back, as SGLang prefills: its shared rows are matched in the
tree; kept rows enter the request when everything before them is there.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from leyline.channel import Channel, EditReport, Fallback, Report
from leyline.directive import Edits, Mode
from leyline.lineage import MARK_BITS, Lineage, Span
from leyline.plan import Compute, Keep, Plan, Segment
from leyline.reuse import (
    Reuse,
    compute_instead,
    edit_reports,
    edits_of,
    fewer_runs,
    provenance,
    reuse,
    share_only,
)

MAX_RUNS = 32
"""Places of a prompt where kept rows follow computed ones: each costs a prefill pass."""


@dataclass(slots=True, eq=False)
class Turn:
    """State of one request.

    unsupported: what of the request a splice doesn't go with; it is then prefilled as usual.
    ahead: it only edits: what SGLang generates for it is nothing of the session's.
    made_from: the lineage that its directives alone made its prompt of.
    source: the lineage that is edited.
    reuse: the plan in force.
    marks: positions of the key whose token carries a mark, and the mark (leyline.lineage).
    spliced: kept rows that have entered the request, in order; from then on its own key finds them.
    moved_away: the source's rows were moved, not copied.
    resumed: it had to give way after that; what its key doesn't find is computed.
    counted: the report stands: a request that had to give way is counted once, as SGLang does.
    promised: kept tokens right behind the shared rows, at the last match.
    private: slots of such rows on their way into the request.
    lock: keeps the source from being evicted while rows of it are still to come.
    doomed: its session has forgotten what it is about meanwhile: what it leaves in the cache is
    dropped when it ends, and with `scrub` zeroed.
    remembered: its edits are counted in the session's lineage.
    """

    channel: Channel
    number: int
    unsupported: str | None = None
    ahead: bool = False
    made_from: Lineage | None = None
    source: Lineage | None = None
    reuse: Reuse = field(default_factory=lambda: share_only(1, 0))
    edits: tuple[EditReport, ...] = ()
    marks: dict[int, int] = field(default_factory=dict)
    spliced: list[Keep] = field(default_factory=list)
    moved_away: bool = False
    resumed: bool = False
    counted: bool = False
    promised: int = 0
    private: Any = None
    lock: Any = None
    begun: bool = False
    doomed: bool = False
    scrub: bool = False
    remembered: bool = False
    report: Report = field(default_factory=lambda: Report(0, 0, 0, 0))
    payload: dict[str, Any] = field(default_factory=dict)
    _derived: tuple[Lineage, int, Edits] | None = None

    # -- planning -----------------------------------------------------------------------------

    def derive(self, lineage: Lineage, prompt: np.ndarray, vocab_size: int) -> Edits:
        """The edits from the lineage to the prompt; the same ones as long as both are.

        Raises DirectiveError for explicit directives that don't fit the lineage.
        """
        if self._derived is None or self._derived[:2] != (lineage, len(prompt)):
            channel = self.channel
            if self.made_from is not None and self.made_from is not lineage:
                channel = _deriving(channel)
            _, edits = edits_of(channel, lineage.tokens, prompt, vocab_size)
            self._derived = lineage, len(prompt), edits
        return self._derived[2]

    def make_prompt(self, lineage: Lineage, vocab_size: int) -> np.ndarray:
        """What the directives alone make of the lineage, int64 `[n]`, n >= 1.

        Raises DirectiveError, or EngineError where they leave nothing.
        """
        prompt, edits = edits_of(self.channel, lineage.tokens, None, vocab_size)
        self._derived = lineage, len(prompt), edits
        self.made_from = lineage
        return prompt

    def plan_without_source(self, length: int, exact: int) -> None:
        """A first request, or one that forgets: exact rows only."""
        self.source = None
        asked = self.channel.directives is not None and not self.channel.forgets
        self.reuse = share_only(length, exact)
        if asked:
            self.reuse = replace(self.reuse, fallback=Fallback.SOURCE_MISSING)
        self.marks = {}
        self.promised = 0

    def plan_unsupported(self, length: int, shared: int) -> None:
        """Prefilled as usual, and said so where a splice was asked for."""
        plain = share_only(length, shared)
        fallback = None if self.channel.forgets else Fallback.UNSUPPORTED_FEATURE
        self.reuse = replace(plain, fallback=fallback)

    def plan_from(
        self, lineage: Lineage, held: int, edits: Edits, *, exact: int, source: int, page: int
    ) -> None:
        """Plan from the session's source; counts as in `leyline.reuse.reuse`."""
        self.source = lineage
        whole = reuse(edits, lineage, exact=exact, source=source, held=held, page=page)
        self.reuse = fewer_runs(whole, MAX_RUNS)
        self.edits = edit_reports(self.channel, edits)
        self.marks = marks_of(lineage.key[: self.reuse.shared]) if self.reuse.from_source else {}
        self.promised = sum(keep.n for keep in self.run_at(self.reuse.shared))

    # -- progress -----------------------------------------------------------------------------

    @property
    def to_come(self) -> tuple[Keep, ...]:
        """Kept rows that have not entered the request yet."""
        return () if self.resumed else self.reuse.moved[len(self.spliced) :]

    def run_at(self, at: int) -> tuple[Keep, ...]:
        """Kept rows that follow one another from target position `at` on."""
        run: list[Keep] = []
        for keep in self.to_come:
            if keep.dst == at:
                run.append(keep)
                at += keep.n
        return tuple(run)

    def next_run(self, at: int) -> int | None:
        """Where, behind target position `at`, kept rows begin next."""
        return next((keep.dst for keep in self.to_come if keep.dst > at), None)

    def skip(self, run: tuple[Keep, ...], reason: Fallback) -> None:
        """These kept rows can't be had: they are computed."""
        self.reuse = replace(compute_instead(self.reuse, run), fallback=reason)

    def entered(self, run: tuple[Keep, ...], serial: int) -> None:
        """Kept rows have entered the request. The first ones are marked in its key (I1, I8)."""
        if not self.spliced:
            self.marks[run[0].dst] = serial
        self.spliced += run

    def forgot(self, freed: int, kept_by_others: int) -> None:
        self.report = replace(self.report, forgotten=freed, kept_by_others=kept_by_others)

    def took(self, seconds: float) -> None:
        """Host time of a splice."""
        ms = self.report.splice_ms + seconds * 1e3
        self.report = replace(self.report, splice_ms=ms)

    # -- key and provenance -------------------------------------------------------------------

    def key(self, tokens: array[int]) -> array[int]:
        """The tokens as a tree key: a copy with this request's marks, or the tokens themselves."""
        marks = {at: serial for at, serial in self.marks.items() if at < len(tokens)}
        if not marks:
            return tokens
        key = array("q", tokens)
        for at, serial in marks.items():
            key[at] += serial << MARK_BITS
        return key

    def lineage(self, tokens: np.ndarray, last: Lineage | None = None) -> Lineage:
        """The session's new lineage: these tokens, with rows computed or kept as was done. last:
        the session's until now."""
        key = np.array(tokens, dtype=np.int64)
        for at, serial in self.marks.items():
            if at < len(key):
                key[at] += serial << MARK_BITS
        channel = self.channel
        done = 0 if self.remembered else len(self.count(self.report.prompt).edits)
        self.remembered = self.remembered or done > 0
        return Lineage(
            owner=channel.owner,
            session=channel.session,
            tokens=tokens,
            key=key,
            spans=self._spans(len(tokens)),
            edits=(last.edits if last else 0) + done,
            created=last.created if last else 0,
        )

    def _spans(self, length: int) -> tuple[Span, ...]:
        if self.source is None:
            return (Span(0, length, True, 0),) if length else ()
        segments: list[Segment] = []
        at = 0
        shared = min(self.reuse.shared, length)
        if shared:
            segments.append(Keep(0, 0, shared))
            at = shared
        for keep in self.spliced:
            n = min(keep.n, length - keep.dst)
            if n <= 0:
                break
            if keep.dst > at:
                segments.append(Compute(at, keep.dst - at))
            segments.append(Keep(keep.src, keep.dst, n))
            at = keep.dst + n
        if at < length:
            segments.append(Compute(at, length - at))
        done = replace(self.reuse, plan=Plan(tuple(segments), length, self._amortized_from(length)))
        return provenance(done, self.source.spans)

    def _amortized_from(self, length: int) -> int:
        """The first amortized row is the first marked one."""
        return min((at for at in self.marks if at < length), default=length)

    # -- report -------------------------------------------------------------------------------

    def count(self, prompt: int) -> Report:
        """What became of the prompt so far."""
        if self.counted:
            return self.report
        moved = sum(keep.n for keep in self.spliced)
        kept = [e for e in self.edits if self.channel.forgets or self._kept_behind(e)]
        return replace(
            self.report,
            prompt=prompt,
            shared=self.reuse.shared,
            moved=moved,
            computed=prompt - self.reuse.shared - moved,
            session=self.channel.session,
            edits=tuple(kept),
            fallback=self.reuse.fallback,
        )

    def give_way(self, cached: int) -> None:
        """The request is put back into the queue; `cached`: prompt tokens that SGLang has counted
        as cached until now."""
        if not self.counted:
            report = self.report
            moved = min(report.moved, max(0, cached - report.shared))
            computed = report.prompt - report.shared - moved
            self.report = replace(report, moved=moved, computed=computed)
        self.counted = True

    def _kept_behind(self, edit: EditReport) -> bool:
        return bool(self.spliced) and self.spliced[-1].src >= edit.end


def _deriving(channel: Channel) -> Channel:
    """For another source than its directives were for: edits are derived, as carefully as these
    asked for."""
    repair = max((d.repair for d in channel.directives or ()), default=0)
    mode = Mode.REPAIR if repair else Mode.AMORTIZE
    return replace(channel, directives=None, mode=mode, repair=repair)


def marks_of(key: np.ndarray) -> dict[int, int]:
    """The marked positions of a key, and their marks."""
    return {int(at): int(key[at] >> MARK_BITS) for at in np.flatnonzero(key >> MARK_BITS)}

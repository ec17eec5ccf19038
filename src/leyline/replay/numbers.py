"""From calls to numbers: one line for each arm and concurrency, and arms compared.

Arms are compared over the same calls: those that every arm of one concurrency got an answer to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from leyline.replay.arms import Arm
from leyline.replay.ceiling import Call
from leyline.replay.client import Answer
from leyline.replay.loop import Run

PAIRS: tuple[tuple[Arm, Arm], ...] = (
    ("truncate", "append"),
    ("splice", "append"),
    ("splice", "truncate"),
    ("forget", "truncate"),
)
"""An arm, and what it is compared with."""

CLEAR = 0.1

Ceilings = Mapping[Arm, Mapping[Call, tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds over the compared calls."""

    p50: float
    p95: float
    total: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times | None:
        if not seconds:
            return None
        p50, p95 = np.percentile(seconds, (50, 95)).tolist()
        return cls(p50, p95, sum(seconds))


@dataclass(frozen=True, slots=True)
class Line:
    """One arm at one concurrency.

    calls = answered + left_out + errors; what follows is over the `compared` ones. cached,
    computed, hit_rate: None where the server doesn't count. ceiling: the hit rate that could be had
    at best, None without a tokenizer; ceiling_prompt: the prompts' tokens by that tokenizer. moved,
    edits, fallbacks: what answers' reports say.
    """

    concurrency: int
    arm: Arm
    calls: int
    answered: int
    left_out: int
    errors: int
    compared: int
    wall_s: float
    prompt: int
    cached: int | None
    computed: int | None
    hit_rate: float | None
    ceiling: float | None
    ceiling_prompt: int | None
    ttft: Times | None
    e2e: Times | None
    moved: int
    edits: int
    fallbacks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm beside another, over the same calls.

    points: of hit rate gained. computed: tokens that this arm computes, as a share of the other's.
    ttft, e2e: the same of the seconds waited in all.

    edited: the calls that at least one of the two sends edited; e2e_edited, saved_edited_s are over
    them. e2e_alike: over the others, where both ask for the same: how steady the machine was.

    same_first: edited calls with the same first token, of the `known` ones where it is to be seen
    in both; different: how many different ones the other arm had there. same_clear, clear: of
    these, calls where both are ahead of their next token by CLEAR nats: the others may differ by
    rounding.
    """

    concurrency: int
    arm: Arm
    beside: Arm
    points: float | None
    computed: float | None
    ttft: float | None
    e2e: float | None
    ttft_saved_s: float
    e2e_saved_s: float
    edited: int
    e2e_edited: float | None
    e2e_alike: float | None
    saved_edited_s: float
    different: int
    same_first: int
    known: int
    same_clear: int
    clear: int

    @property
    def agreement(self) -> float | None:
        return self.same_first / self.known if self.known else None


def lines_of(runs: Sequence[Run], ceilings: Ceilings) -> list[Line]:
    """A line for each run."""
    return [_line(run, _common(runs, run.concurrency), ceilings.get(run.arm, {})) for run in runs]


def comparisons_of(runs: Sequence[Run], lines: Sequence[Line]) -> list[Comparison]:
    """All of PAIRS, for each concurrency, of which both arms were run."""
    at = {(run.concurrency, run.arm): (run, line) for run, line in zip(runs, lines, strict=True)}
    found = []
    for concurrency in dict.fromkeys(run.concurrency for run in runs):
        for arm, beside in PAIRS:
            if (concurrency, arm) in at and (concurrency, beside) in at:
                calls = _common(runs, concurrency)
                found.append(_compare(at[concurrency, arm], at[concurrency, beside], calls))
    return found


def errors_of(runs: Sequence[Run]) -> dict[str, int]:
    """Texts of errors, and how often each came."""
    texts = (outcome.error for run in runs for outcome in run.outcomes)
    return dict(Counter(text for text in texts if text is not None).most_common())


def _answers(run: Run) -> dict[Call, Answer]:
    return {(o.session, o.call): o.answer for o in run.outcomes if o.answer is not None}


def _common(runs: Sequence[Run], concurrency: int) -> list[Call]:
    """Calls that all arms of one concurrency got an answer to."""
    answered = [set(_answers(run)) for run in runs if run.concurrency == concurrency]
    return sorted(set.intersection(*answered))


def _line(run: Run, calls: list[Call], ceiling: Mapping[Call, tuple[int, int]]) -> Line:
    by_call = _answers(run)
    answers = [by_call[call] for call in calls]
    prompt = sum(answer.prompt or 0 for answer in answers)
    cached = _cached(run, answers)
    reports = [answer.report for answer in answers if answer.report is not None]
    best = [ceiling[call] for call in calls if call in ceiling]
    whole = sum(n for n, _ in best)
    return Line(
        concurrency=run.concurrency,
        arm=run.arm,
        calls=len(run.outcomes),
        answered=len(by_call),
        left_out=sum(outcome.left_out for outcome in run.outcomes),
        errors=sum(outcome.error is not None for outcome in run.outcomes),
        compared=len(calls),
        wall_s=run.wall_s,
        prompt=prompt,
        cached=cached,
        computed=None if cached is None else prompt - cached,
        hit_rate=None if cached is None or not prompt else cached / prompt,
        ceiling=sum(n for _, n in best) / whole if whole else None,
        ceiling_prompt=whole or None,
        ttft=Times.of([answer.ttft_s for answer in answers]),
        e2e=Times.of([answer.e2e_s for answer in answers]),
        moved=sum(report["tokens"]["moved"] for report in reports),
        edits=sum(len(report["edits"]) for report in reports),
        fallbacks=dict(Counter(r["fallback"] for r in reports if r["fallback"] is not None)),
    )


def _cached(run: Run, answers: list[Answer]) -> int | None:
    """Servers leave the count out where it is 0; one that never gives it doesn't count."""
    if all(answer.cached is None for answer in _answers(run).values()):
        return None
    return sum(answer.cached or 0 for answer in answers)


def _compare(mine: tuple[Run, Line], other: tuple[Run, Line], calls: Sequence[Call]) -> Comparison:
    (run, line), (run_beside, beside) = mine, other
    first, second = _answers(run), _answers(run_beside)
    changed = _edited(run) | _edited(run_beside)
    pairs = [(first[call], second[call]) for call in calls if call in changed]
    alike = [(first[call], second[call]) for call in calls if call not in changed]
    known = [(a, b) for a, b in pairs if a.first_token is not None and b.first_token is not None]
    clear = [(a, b) for a, b in known if min(a.margin or 0, b.margin or 0) >= CLEAR]
    gained = None
    if line.hit_rate is not None and beside.hit_rate is not None:
        gained = 100 * (line.hit_rate - beside.hit_rate)
    ttft, ttft_beside = _total(line.ttft), _total(beside.ttft)
    e2e, e2e_beside = _total(line.e2e), _total(beside.e2e)
    return Comparison(
        concurrency=line.concurrency,
        arm=line.arm,
        beside=beside.arm,
        points=gained,
        computed=_ratio(line.computed, beside.computed),
        ttft=_ratio(ttft, ttft_beside),
        e2e=_ratio(e2e, e2e_beside),
        ttft_saved_s=ttft_beside - ttft,
        e2e_saved_s=e2e_beside - e2e,
        edited=len(pairs),
        e2e_edited=_e2e_ratio(pairs),
        e2e_alike=_e2e_ratio(alike),
        saved_edited_s=sum(b.e2e_s - a.e2e_s for a, b in pairs),
        different=len({b.first_token for _, b in known}),
        same_first=_same(known),
        known=len(known),
        same_clear=_same(clear),
        clear=len(clear),
    )


def _edited(run: Run) -> set[Call]:
    return {(o.session, o.call) for o in run.outcomes if o.edited}


def _e2e_ratio(pairs: Sequence[tuple[Answer, Answer]]) -> float | None:
    return _ratio(sum(a.e2e_s for a, _ in pairs), sum(b.e2e_s for _, b in pairs))


def _same(pairs: Sequence[tuple[Answer, Answer]]) -> int:
    return sum(a.first_token == b.first_token for a, b in pairs)


def _total(times: Times | None) -> float:
    return times.total if times else 0.0


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None

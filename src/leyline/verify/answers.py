"""What a splice does to real answers: how likely the recorded answers of agent sessions are, turn
after turn, while edits pile up.

Each turn's prompt is the recorded one with all but the newest tool outputs cleared. In the spliced
arms each turn splices what the turn before has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from leyline.bench.row import Row
from leyline.channel import Channel
from leyline.directive import Mode
from leyline.engine.engine import Engine
from leyline.replay.turns import Turn, fitting, turns_of
from leyline.traces import Session, load_traces, shortest
from leyline.verify.look import logits, prefill, session_key
from leyline.verify.student import quantile
from leyline.verify.subject import Subject

KEEP = 2
FULL, FRESH, SPLICE, UNTURNED = "full context", "fresh prefill", "splice", "splice, unturned"
MOST = 0.05
"""Nats a token that a splice may cost against a fresh prefill."""

CHANCE, ENOUGH = 0.01, 10
"""How often chance may make the control as much worse as is asked for, were turns independent; and
turns from which on it is asked."""


@dataclass(frozen=True, slots=True)
class Arm:
    """edited: whether tool outputs are cleared. session: whether rows are spliced. turned: False
    for the control, whose kept rows keep the rotation of their old positions."""

    name: str
    edited: bool = True
    session: bool = True
    repair: int = 0
    turned: bool = True


ARMS = (
    Arm(FULL, edited=False, session=False),
    Arm(FRESH, session=False),
    Arm(SPLICE),
    Arm("REPAIR(64)", repair=64),
    Arm("REPAIR(256)", repair=256),
    Arm(UNTURNED, turned=False),
)


@dataclass(frozen=True, slots=True)
class Said:
    """One turn: negative log-likelihood of the recorded answer, summed, in nats; tops: the model's
    first choice for each of its tokens."""

    session: str
    turn: int
    tokens: int
    nll: float
    tops: tuple[int, ...]
    computed: int
    edited: bool
    """Whether anything was cleared from its prompt by then."""


@dataclass(slots=True)
class Found:
    arms: dict[str, list[Said]] = field(default_factory=dict)


def run(
    subject: Subject, sessions: int, calls: int | None, say: Callable[[str], None]
) -> list[Row]:
    """sessions: so many of the recorded ones of 15 calls and more, shortest first. calls: of each
    at most so many."""
    found = Found({arm.name: [] for arm in ARMS})
    for session in shortest([s for s in load_traces() if len(s.gaps_ms) >= 14], sessions):
        turns = Turns.of(subject, session, calls)
        for arm in ARMS:
            say(f"session {session.id}, {arm.name}")
            found.arms[arm.name] += replay(subject, turns, arm)
    return _rows(found)


@dataclass(frozen=True, slots=True)
class Turns:
    """A session's calls, with their whole context and with tool outputs cleared."""

    session: str
    plain: list[Turn]
    edited: list[Turn]

    @classmethod
    def of(cls, subject: Subject, session: Session, calls: int | None) -> Turns:
        """calls: at most so many."""
        plain = turns_of(subject.tokenizer, session, keep=len(session.messages))
        edited = turns_of(subject.tokenizer, session, keep=KEEP)
        return cls(session.id, plain[:calls], edited[:calls])


def replay(subject: Subject, turns: Turns, arm: Arm) -> Iterator[Said]:
    """What the model makes of each recorded answer. Empties the engine's cache."""
    engine = subject.engine
    asked = turns.edited if arm.edited else turns.plain
    mode = Mode.REPAIR if arm.repair else Mode.AMORTIZE
    channel = Channel("verify", mode=mode, repair=arm.repair) if arm.session else None
    engine.reset()
    with unturned(engine, not arm.turned):
        for i in range(fitting(asked, engine.max_tokens)):
            was_edited = not np.array_equal(turns.plain[i].prompt, turns.edited[i].prompt)
            yield _say(engine, asked[i], channel, turns.session, i, was_edited)


def _say(
    engine: Engine, turn: Turn, channel: Channel | None, session: str, i: int, edited: bool
) -> Said:
    report = prefill(engine, turn.prompt, channel)
    whole = np.concatenate([turn.prompt, turn.answer[:-1]])
    prefill(engine, whole, channel)  # the recorded answer, in one pass
    key = whole if channel is None else session_key(engine, channel.session)
    if len(key) != len(whole):
        raise RuntimeError(f"session {session}, turn {i}: its answer was not cached: more --memory")
    behind = logits(engine, key, len(turn.prompt) - 1)
    nll = -float(_chosen(behind.double().log_softmax(-1), turn.answer).sum())
    tops = tuple(behind.argmax(-1).tolist())
    return Said(session, i, len(turn.answer), nll, tops, report.computed, edited)


def _chosen(distribution: Tensor, tokens: tuple[int, ...]) -> Tensor:
    return distribution[range(len(tokens)), list(tokens)]


@contextmanager
def unturned(engine: Engine, really: bool = True) -> Iterator[None]:
    """Splices that leave rows as they are: the control that a test of the whole path needs."""
    if not really:
        yield
        return
    planes = engine.store.planes
    copy = planes.copy
    planes.rotate = lambda slots, shifts: None  # type: ignore[method-assign]
    planes.copy = lambda source, target, shifts: copy(source, target, 0 * shifts)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del planes.rotate, planes.copy


def mean_nll(said: list[Said]) -> float:
    """Nats a token."""
    return sum(each.nll for each in said) / sum(each.tokens for each in said)


def _rows(found: Found) -> list[Row]:
    """Over turns that something was cleared from, and of these over those that the full context
    fits into."""
    edited = {name: [s for s in said if s.edited] for name, said in found.arms.items()}
    fit = {(s.session, s.turn) for s in edited[FULL]}
    both = {n: [s for s in said if (s.session, s.turn) in fit] for n, said in edited.items()}
    if not fit:
        raise RuntimeError("no turn with an edit fits the model with its full context")
    nll = {name: mean_nll(said) for name, said in both.items()}
    every = {name: mean_nll(said) for name, said in edited.items() if name != FULL}
    agree = {name: _agreement(said, both[FULL]) for name, said in both.items()}
    tops = {name: _agreement(said, both[FULL], None) for name, said in both.items()}
    details = {
        "nll": nll,
        "nll_of_all_edited": every,
        "first_token_as_full": agree,
        "first_tokens": len({s.tops[0] for s in both[FULL]}),
        "tokens_as_full": tops,
        "first_token_as_fresh": {n: _agreement(s, both[FRESH]) for n, s in both.items()},
        "turns": len(fit),
        "turns_edited": len(edited[FRESH]),
        "tokens": sum(s.tokens for s in both[FULL]),
        "computed": {name: sum(s.computed for s in said) for name, said in both.items()},
        "sessions": sorted({s.session for s in found.arms[FULL]}),
        "by_turn": {
            name: [(s.session, s.turn, s.tokens, s.nll) for s in said]
            for name, said in found.arms.items()
        },
    }
    return [
        Row(
            "answers.splice",
            f"nats a token of the recorded answers, splice ({len(fit)} edited turns)",
            nll[SPLICE],
            unit="nats",
            details=details,
        ),
        Row("answers.full", "the same, full context", nll[FULL], unit="nats"),
        Row(
            "answers.fresh", "the same, fresh prefill of the edited prompt", nll[FRESH], unit="nats"
        ),
        Row(
            "answers.cost",
            "nats a token that the splice is worse than the fresh prefill",
            nll[SPLICE] - nll[FRESH],
            unit="nats",
            # Half of what no rotation at all costs, so that it would not pass.
            at_most=min(MOST, max(0.0, (nll[UNTURNED] - nll[FRESH]) / 2)),
        ),
        Row(
            "answers.control",
            "control: nats a token that a splice without rotation is worse than the splice",
            nll[UNTURNED] - nll[SPLICE],
            unit="nats",
        ),
        _clear(both[UNTURNED], both[SPLICE]),
        Row(
            "answers.first",
            "first tokens as with the full context, splice (fresh prefill: "
            f"{agree[FRESH]:.1%}, unturned: {agree[UNTURNED]:.1%}; paper: 100 %)",
            agree[SPLICE],
            unit="share",
        ),
        Row(
            "answers.tokens",
            "first choices for all tokens of the answers as with the full context, splice (fresh "
            f"prefill: {tops[FRESH]:.1%}, unturned: {tops[UNTURNED]:.1%})",
            tops[SPLICE],
            unit="share",
        ),
    ]


def _clear(control: list[Said], splice: list[Said]) -> Row:
    """By how many standard errors the control is worse; with too few turns nothing is asked."""
    name, what = "answers.control.clear", "the same in its standard errors"
    value = standard_errors(control, splice)
    if len(control) < ENOUGH:
        return Row(name, what, value, unit="plain")
    bound = quantile(1 - CHANCE, len(control) - 1)
    if_so = f"{bound:.3g}: by chance once in a hundred, if turns were independent"
    return Row(name, f"{what} ({if_so})", value, unit="plain", at_least=bound)


def standard_errors(ours: list[Said], theirs: list[Said]) -> float:
    """Mean difference of the likelihood a token, over its standard error: turns are drawn, and
    their tokens go together (a ratio estimate; Cochran, Sampling Techniques, 6.4). NaN for fewer
    than two turns, or where all differ alike."""
    apart = np.array([a.nll - b.nll for a, b in zip(ours, theirs, strict=True)])
    tokens = np.array([each.tokens for each in ours])
    mean, n = apart.sum() / tokens.sum(), len(tokens)
    if n < 2:
        return float("nan")
    error = np.sqrt(((apart - mean * tokens) ** 2).sum() * n / (n - 1)) / tokens.sum()
    return float(mean / error) if error else float("nan")


def _agreement(ours: list[Said], theirs: list[Said], first: int | None = 1) -> float:
    """Share of the answers' first tokens, or with None of all, at which the model would have gone
    on with the same token. Before each stand the recorded ones, in both."""
    known = {(s.session, s.turn): s.tops[:first] for s in theirs}
    same = [
        a == b
        for s in ours
        for a, b in zip(s.tops[:first], known.get((s.session, s.turn), ()), strict=False)
    ]
    return sum(same) / len(same) if same else float("nan")

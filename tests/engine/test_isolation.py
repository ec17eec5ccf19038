"""I1, I8: plain requests and sessions mixed at random: nobody finds rows that are not exact, but
the session that made them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from helpers import (
    ALL,
    PREFILL,
    ask,
    assert_same,
    check_slots,
    engine,
    fresh,
    fresh_rows,
    greedy,
    lineage,
    marked,
    nodes_of,
    rows_of,
    tokens_of,
)

from leyline.channel import Channel, Fallback
from leyline.directive import Directive, Mode
from leyline.engine.engine import Answer, Engine
from leyline.engine.request import Request, Sampling
from leyline.engine.tree import PUBLIC, common_prefix

NAME = "deepseek_v2"
SESSIONS = [Channel("a"), Channel("b"), Channel("a", owner="other")]


@dataclass
class Talk:
    """A session as its client sees it."""

    channel: Channel
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """A request, and whether it is waited for before the next one is sent."""

    who: int | None
    prompt: np.ndarray
    channel: Channel | None
    wait: bool


class Mix:
    """Random requests: plain ones, which repeat what sessions say, edited or not; sessions that go
    on, edit and forget."""

    def __init__(self, seed: int, forget: bool = True) -> None:
        self.rng = np.random.default_rng(seed)
        self.system = tokens_of(self.rng, 30).tolist()
        self.talks = [Talk(channel) for channel in SESSIONS]
        self.said: list[list[int]] = [self.system]
        self.forget = forget

    def next(self) -> Step:
        who = int(self.rng.integers(0, 5))
        if who > 2:
            base = self.said[int(self.rng.integers(0, len(self.said)))]
            cut = int(self.rng.integers(1, len(base) + 1))
            tokens = base[:cut] + self.new(int(self.rng.integers(0, 6)))
            return Step(None, np.array(tokens), None, bool(self.rng.random() < 0.6))
        talk = self.talks[who]
        mode = Mode.FORGET if self.forget and self.rng.random() < 0.15 else Mode.AMORTIZE
        if len(talk.tokens) < 60 or len(talk.tokens) > 200:
            talk.tokens = self.system + self.new(50)
        elif self.rng.random() < 0.7:
            start = int(self.rng.integers(0, len(talk.tokens) - 30))
            end = start + int(self.rng.integers(0, 20))
            talk.tokens = (
                talk.tokens[:start] + self.new(int(self.rng.integers(1, 5))) + talk.tokens[end:]
            )
        talk.tokens = talk.tokens + self.new(int(self.rng.integers(1, 8)))
        self.said.append(talk.tokens)
        channel = Channel(talk.channel.session, talk.channel.owner, mode)
        return Step(who, np.array(talk.tokens), channel, bool(self.rng.random() < 0.6))

    def new(self, n: int) -> list[int]:
        return self.rng.integers(3, 512, n).tolist()


def serve(made: Engine, steps: list[Step], sampling: Sampling) -> list[Answer]:
    handles, answers = [], {}
    for i, step in enumerate(steps):
        handles.append(made.submit(Request(step.prompt, sampling, step.channel)))
        if step.wait:
            answers[i] = handles[i].result()
    return [answers[i] if i in answers else handle.result() for i, handle in enumerate(handles)]


def check_tree(made: Engine, name: str) -> None:
    """Marked rows have one user, a session. Every other row is exact: what Transformers gives for
    the tokens before it."""
    leaves = []
    for key, node in nodes_of(made):
        if marked(key):
            assert len(node.users) == 1 and PUBLIC not in node.users, node.users
            first = int(np.flatnonzero(key >> 32)[0])
            assert not marked(key[:first])
        elif not any(not marked(child.key) for child in node.children.values()):
            leaves.append(key)
    for key in leaves:
        for (k, v), (k2, v2) in zip(rows_of(made, key), fresh_rows(name, key), strict=True):
            # A few hundred fp32 roundings in another order. Amortized rows are off by tenths.
            assert (k - k2).abs().max() < 1e-3 and (v - v2).abs().max() < 1e-3


@pytest.mark.parametrize("slots", [260, 4000])
@pytest.mark.parametrize("seed", range(6))
def test_random_mix(seed: int, slots: int) -> None:
    """I1, I8: plain requests get what Transformers gives on an empty cache, with room and with
    evictions; whatever lies in the tree without a mark is exact."""
    mix = Mix(seed)
    steps = [mix.next() for _ in range(40)]
    with engine(NAME, slots=slots, chunk=64, max_tokens=240) as made:
        answers = serve(made, steps, greedy(3, ALL))
        moved = sum(a.report.moved > 0 for a in answers if a.report)
        assert moved > 3
        for step, answer in zip(steps, answers, strict=True):
            assert answer.report is not None and len(answer.tokens) == 3
            forgets = step.channel is not None and step.channel.mode == Mode.FORGET
            if step.channel is None or forgets:
                assert_same(answer, fresh(NAME, step.prompt, answer.tokens), 1e-4)
        check_tree(made, NAME)
        check_slots(made)
        if slots == 260:
            assert made.stats().free < 100, "nothing had to give way"


@pytest.mark.parametrize("seed", range(4))
def test_plain_counts_beside_sessions(seed: int) -> None:
    """I1: with room for all, a plain request's cached count is at least that of an engine which saw
    the plain requests only, and at most what any earlier request of anybody shares with it.

    It can be more than the former: exact rows that a session computed are for everybody. It can't
    be less: rows that a plain request used are neither moved nor forgotten.
    """
    mix = Mix(seed + 50)
    steps = [Step(s.who, s.prompt, s.channel, True) for s in (mix.next() for _ in range(40))]
    plain = [step for step in steps if step.channel is None]
    with engine(NAME) as made:
        mixed = [
            a
            for s, a in zip(steps, serve(made, steps, greedy(2)), strict=True)
            if s.channel is None
        ]
    with engine(NAME) as made:
        alone = serve(made, plain, greedy(2))
    before: list[np.ndarray] = []
    found = iter(zip(mixed, alone, strict=True))
    gained = 0
    for step in steps:
        if step.channel is None:
            a, b = next(found)
            assert a.report is not None and b.report is not None
            assert a.tokens == b.tokens
            most = max((common_prefix(step.prompt[:-1], old) for old in before), default=0)
            assert (
                b.report.cached <= a.report.cached <= most + 2
            )  # an answer's two tokens may fit too
            gained += a.report.cached > b.report.cached
        before.append(step.prompt)
    assert gained, "no plain request met a session's rows: the mix is too thin"


@pytest.mark.parametrize("seed", range(3))
def test_plain_counts_are_those_without_leyline(seed: int) -> None:
    """I1: plain requests that have nothing but a public prefix in common with sessions get the same
    tokens and exactly the same cached counts as from an engine with directives off, whatever the
    sessions edit."""
    rng = np.random.default_rng(seed)
    mix = Mix(seed + 90)
    steps = [Step(None, np.array(mix.system), None, True)]
    mine = mix.system
    while len(steps) < 40:
        step = mix.next()
        if step.channel is None:
            if rng.random() < 0.3:
                mine = mix.system + rng.integers(3, 512, 20).tolist()
            mine = mine + rng.integers(3, 512, 5).tolist()
            step = Step(None, np.array(mine), None, True)
        steps.append(Step(step.who, step.prompt, step.channel, True))
    results = []
    for on in (True, False):
        with engine(NAME, directives=on) as made:
            answers = serve(made, steps, greedy(2))
            results.append(
                [
                    (a.tokens, a.report.cached)
                    for s, a in zip(steps, answers, strict=True)
                    if s.channel is None and a.report
                ]
            )
            moved = sum(a.report.moved for a in answers if a.report)
            assert (moved > 0) == on
    assert results[0] == results[1] and len(results[0]) > 10


def amortize(made: Engine, session: str = "a", owner: str = "") -> tuple[np.ndarray, np.ndarray]:
    """A session with moved rows: its first prompt and its edited one."""
    prompt = tokens_of(np.random.default_rng(1), 120)
    made.submit(Request(prompt, PREFILL, Channel(session, owner))).result()
    target = np.concatenate([prompt[:30], prompt[50:], [9]])
    answer = made.submit(Request(target, PREFILL, Channel(session, owner))).result()
    assert answer.report is not None and answer.report.moved == 70
    assert lineage(made, session, owner).edits == 1
    return prompt, target


@pytest.mark.parametrize("who", [None, Channel("b"), Channel("a", owner="other")])
def test_the_same_tokens_from_somebody_else(who: Channel | None) -> None:
    """I8: the very prompt whose amortized rows a session holds is prefilled for everybody else,
    exactly, from the first edit on; the session itself goes on finding its rows."""
    with engine(NAME) as made:
        _, target = amortize(made)
        own = rows_of(made, lineage(made, "a").key)
        answer = made.submit(Request(target, greedy(4, ALL), who)).result()
        report = answer.report
        assert report is not None
        assert (report.cached, report.computed, report.fallback) == (30, len(target) - 30, None)
        assert_same(answer, fresh(NAME, target, answer.tokens), 1e-4)
        for (k, v), (k2, v2) in zip(own, rows_of(made, lineage(made, "a").key), strict=True):
            assert torch.equal(k, k2) and torch.equal(v, v2)
        check_tree(made, NAME)


def test_two_sessions_that_do_the_same() -> None:
    """I8: sessions with the same prompt and the same edit have amortized rows of their own, and one
    that forgets or is dropped takes nothing from the other."""
    with engine(NAME) as made:
        amortize(made, "a")
        _, target = amortize(made, "b")
        a, b = (lineage(made, session).key for session in "ab")
        assert np.array_equal(a[:30], b[:30]) and common_prefix(a, b) == 30
        slots = [made.store.tree.match(key).slots for key in (a, b)]
        assert len(np.intersect1d(slots[0][30:], slots[1][30:])) == 0
        check_tree(made, NAME)
        before = rows_of(made, b)
        made.drop_session("", "a", scrub=True)
        assert made.store.tree.match(a).n == 30
        for (k, v), (k2, v2) in zip(before, rows_of(made, b), strict=True):
            assert torch.equal(k, k2) and torch.equal(v, v2)
        view = made.session("", "b")
        assert view is not None and view.cached == len(target)


def test_two_owners_with_one_name() -> None:
    """I8: sessions of one name and two owners know nothing of each other; dropping one leaves the
    other."""
    with engine(NAME) as made:
        _, target = amortize(made)
        directive = (Directive(0, 5),)
        stranger = Channel("a", owner="other", directives=directive)
        answer = made.submit(Request(target, greedy(3, ALL), stranger)).result()
        assert answer.report is not None
        assert (answer.report.fallback, answer.report.moved) == (Fallback.SOURCE_MISSING, 0)
        assert_same(answer, fresh(NAME, target, answer.tokens), 1e-4)
        assert made.drop_session("third", "a") is None
        assert made.drop_session("other", "a") is not None
        assert made.session("other", "a") is None
        view = made.session("", "a")
        assert view is not None and view.cached == view.tokens == len(target)


def test_names_are_data() -> None:
    """I8: names that look like others joined, or like paths, are sessions of their own."""
    names = [
        ("", "a"),
        ("a", ""),
        ("", "a/b"),
        ("a", "b"),
        ("a/b", ""),
        ("", "../a"),
        ("", "\x00"),
        ("", "é"),
    ]
    with engine(NAME) as made:
        for owner, session in names:
            assert made.session(owner, session) is None
            prompt = tokens_of(np.random.default_rng(len(owner + session)), 20)
            ask(made, prompt, session=session, owner=owner)
            view = made.session(owner, session)
            assert view is not None and view.tokens == 20
        assert made.stats().sessions == len(names)

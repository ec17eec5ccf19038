"""Sessions of a scheduler, without a server: which slots are whose alone (I5, I8), and bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from leyline.lineage import Lineage, Span
from leyline.sglang import sessions
from leyline.sglang.sessions import PUBLIC, Sessions, Users

SLOTS = 12
SOME = st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=SLOTS)
WHO = st.integers(PUBLIC, 3)


class UsersMachine(RuleBasedStateMachine):
    """`Users` against the set of all users of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.users = Users(SLOTS, "cpu")
        self.model: list[set[int]] = [{PUBLIC} for _ in range(SLOTS)]

    @rule(slots=SOME, who=st.integers(1, 3))
    def own(self, slots: list[int], who: int) -> None:
        self.users.own(torch.tensor(slots, dtype=torch.int64), who)
        for slot in slots:
            self.model[slot] = {who}

    @rule(slots=SOME, who=WHO)
    def use(self, slots: list[int], who: int) -> None:
        self.users.use(torch.tensor(slots, dtype=torch.int64), who)
        for slot in slots:
            self.model[slot].add(who)

    @rule(slots=SOME, who=WHO, taken=st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS))
    def insert(self, slots: list[int], who: int, taken: list[bool]) -> None:
        """taken: the tree took the row itself, else it had one of its own in that slot."""
        now = torch.tensor(slots, dtype=torch.int64)
        before = torch.tensor(
            [slot if taken[slot] else SLOTS + slot for slot in slots], dtype=torch.int64
        )
        self.users.inserted(now, before, who)
        for slot in slots:
            self.model[slot] = {who} if taken[slot] else self.model[slot] | {who}

    @invariant()
    def each_alone(self) -> None:
        for slot, users in enumerate(self.model):
            for who in range(4):
                alone = users == {who} and who != PUBLIC
                assert self.users.alone(torch.tensor([slot]), who) == alone, (slot, who, users)

    @rule(slots=SOME, who=WHO)
    def all_alone(self, slots: list[int], who: int) -> None:
        alone = who != PUBLIC and all(self.model[slot] == {who} for slot in slots)
        assert self.users.alone(torch.tensor(slots, dtype=torch.int64), who) == alone


TestUsers = UsersMachine.TestCase
TestUsers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def lineage(session: str, n: int = 3) -> Lineage:
    tokens = np.arange(n)
    return Lineage("o", session, tokens, tokens, (Span(0, n, True, 0),))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    """At most 3 sessions, 20 tokens and 4 branches of each."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    monkeypatch.setattr(sessions, "MAX_TOKENS", 20)
    monkeypatch.setattr(sessions, "MAX_LEAVES", 4)
    return Sessions()


def test_bounds(small: Sessions) -> None:
    """The least recently used session gives way, with its branches; its number stays its own."""
    for i in range(5):
        small.number(("o", f"s{i}"))
        small.add_leaf(("o", f"s{i}"), i)
        small.remember(lineage(f"s{i}"))
    assert [each.session for each in small.lineages] == ["s2", "s3", "s4"]
    assert small.forget(("o", "s0")) == [] and small.forget(("o", "s3")) == [3]
    assert small.gone == [(1, [0]), (2, [1])], "their rows are to be dropped"
    small.remember(lineage("long", 19))
    assert [each.session for each in small.lineages] == ["long"]


def test_a_number_that_gives_way_gives_up_its_branches(small: Sessions) -> None:
    """Names that never leave a lineage behind are bounded too."""
    for i in range(8):
        small.number(("o", f"s{i}"))
        small.add_leaf(("o", f"s{i}"), i)
    assert small.gone == [(1, [0]), (2, [1])]
    assert small.forget(("o", "s1")) == [] and small.forget(("o", "s2")) == [2]


def test_a_branch_that_comes_after_its_number_has_gone(small: Sessions) -> None:
    """A request that runs while many names come: what it leaves is given up, not lost track of."""
    small.number(("o", "slow"))
    for i in range(8):
        small.number(("o", f"s{i}"))
    small.add_leaf(("o", "slow"), 7)
    small.remember(lineage("slow"))
    for i in range(3):
        small.remember(lineage(f"s{i}"))
    assert small.gone == [(PUBLIC, [7])]


def test_too_long_to_hold(small: Sessions) -> None:
    """Its last lineage is dropped: it would be another text than the session's. Its branches stay
    known, to be forgotten."""
    small.add_leaf(("o", "s"), 8)
    small.remember(lineage("s"))
    small.remember(lineage("s", 21))
    assert small.lineages.get("o", "s") is None
    assert small.forget(("o", "s")) == [8]


def test_branches(small: Sessions) -> None:
    """Newest first, each once, not more than so many; the oldest is given up for a new one."""
    number = small.number(("o", "s"))
    for leaf in (1, 2, 3, 4, 5, 3):
        small.add_leaf(("o", "s"), leaf)
    assert small.gone == [(number, [1])]
    assert small.forget(("o", "s")) == [3, 5, 4, 2]
    assert small.forget(("o", "s")) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abcdefghijkl") | st.just(None), max_size=80))
def test_numbers_are_never_used_twice(names: list[str | None]) -> None:
    """I8: whoever comes back after many others, or after a flush, is not taken for somebody else.
    None: the tree is emptied."""
    known = Sessions()
    drawn: dict[int, str] = {}
    serials: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "MAX_SESSIONS", 3)
        for name in names:
            if name is None:
                known.clear()
                assert len(known.lineages) == 0
                continue
            number = known.number(("o", name))
            assert number != PUBLIC and drawn.setdefault(number, name) == name
            assert known.number(("o", name)) == number
            serial = known.next_serial()
            assert serial not in serials and 1 <= serial < 2**31
            serials.add(serial)
            assert len(known._numbers) <= 2 * sessions.MAX_SESSIONS


def test_empty() -> None:
    """A scheduler that never saw a session is to do nothing for any."""
    known = Sessions()
    assert not known
    known.number(("", "s"))
    assert known

"""Lineages: provenance of rows, marks, and bounds on what is held."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from edit_strategies import edits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_plan import executed, new_tokens, prefilled

from leyline.directive import Directive, Edits, Mode
from leyline.lineage import MARK_BITS, Lineage, Lineages, Span, mark_key, spans_after
from leyline.plan import make_plan


def lineage(owner: str, session: str, n: int = 3, spans: tuple[Span, ...] = ()) -> Lineage:
    tokens = np.arange(n)
    return Lineage(owner, session, tokens, tokens, spans)


# --- provenance ---------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.data(), st.integers(1, 30))
def test_provenance_over_a_chain_of_edits(data: st.DataObject, length: int) -> None:
    """Design §6: row by row, spans say whether it is what a prefill gives, and its rotations."""
    tokens = list(range(length))
    rows, rotations = prefilled(tokens), [0] * length
    spans: tuple[Span, ...] = (Span(0, length, True, 0),)
    for turn in range(4):
        new = new_tokens.map(lambda t, turn=turn: t + 100 * turn)
        edits = data.draw(edits_of(len(tokens), modes=tuple(Mode), tokens=new, max_edits=3))
        held = Lineage("o", "s", np.array(tokens), np.array(tokens), spans)
        available = data.draw(st.just(len(tokens)) | st.integers(0, len(tokens)))
        plan = make_plan(edits, available=available, exact=held.exact)
        tokens = edits.apply(tokens).tolist()
        rows = executed(plan, rows, tokens)
        before, rotations = rotations, [0] * len(tokens)
        for keep in plan.keeps:
            for x in range(keep.n):
                rotations[keep.dst + x] = before[keep.src + x] + (keep.shift != 0)
                if keep.dst >= plan.shared:
                    # Edited before it, so amortized, even if a later edit undoes that one.
                    rows[keep.dst + x] = hash((rows[keep.dst + x], "moved"))
        spans = spans_after(plan, spans)
        fresh = prefilled(tokens)
        per_row = [(s.exact, s.rotations) for s in spans for _ in range(s.n)]
        wanted = [(a == b, r) for a, b, r in zip(rows, fresh, rotations, strict=True)]
        assert per_row == wanted
        assert [s.start for s in spans] == [sum(s.n for s in spans[:x]) for x in range(len(spans))]
        assert all(s.n > 0 for s in spans)
        assert all((a.exact, a.rotations) != (b.exact, b.rotations) for a, b in pairwise(spans))


def test_spans_of_a_lineage() -> None:
    spans = (Span(0, 4, True, 0), Span(4, 2, False, 0), Span(6, 3, False, 2))
    held = lineage("o", "s", 9, spans)
    assert held.exact == 4 and held.max_rotations == 2
    assert lineage("o", "s", 0).exact == lineage("o", "s", 0).max_rotations == 0


def test_shift_of_zero_is_no_rotation_but_amortized() -> None:
    plan = make_plan(Edits.of([Directive(2, 4, (7, 8))], 10))
    assert spans_after(plan, (Span(0, 10, True, 0),)) == (
        Span(0, 4, True, 0),
        Span(4, 6, False, 0),
    )


def test_rows_without_provenance_are_refused() -> None:
    with pytest.raises(ValueError, match=r"keeps source rows \[0, 9\), 3 not in spans"):
        spans_after(make_plan(Edits.of((), 10)), (Span(0, 6, True, 0),))


# --- marks --------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9),
    st.data(),
    st.integers(1, 2**31 - 1),
    st.integers(1, 2**31 - 1),
)
def test_marked_key_is_met_by_no_other(
    tokens: list[int], data: st.DataObject, serial: int, other: int
) -> None:
    """I8: it shares the exact prefix; from the mark on, it equals neither tokens nor other keys."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    key = mark_key(np.array(tokens), at, serial)
    assert key.dtype == np.int64
    assert key[:at].tolist() == tokens[:at] and key[at + 1 :].tolist() == tokens[at + 1 :]
    assert key[at] >= 2**MARK_BITS > max(tokens)
    assert key[at] & (2**MARK_BITS - 1) == tokens[at] and key[at] >> MARK_BITS == serial
    assert (mark_key(np.array(tokens), at, other)[at] == key[at]) == (serial == other)


def test_mark_behind_the_end_marks_nothing() -> None:
    tokens = np.array([1, 2])
    key = mark_key(tokens, 2, 1)
    assert key.tolist() == [1, 2] and not np.shares_memory(key, tokens)
    for at, serial in ((3, 1), (-1, 1), (0, 0), (0, 2**31)):
        with pytest.raises(ValueError, match=r"outside|marks are 1 to"):
            mark_key(tokens, at, serial)


# --- bounds -------------------------------------------------------------------------------------


class LineagesMachine(RuleBasedStateMachine):
    """Random use, against a list in order of use."""

    @initialize(sessions=st.integers(1, 4), tokens=st.integers(1, 20))
    def start(self, sessions: int, tokens: int) -> None:
        self.now = 100.0
        self.max_sessions, self.max_tokens = sessions, tokens
        self.held = Lineages(sessions, tokens, ttl_s=10, clock=lambda: self.now)
        self.model: list[Lineage] = []  # least recently used first

    def find(self, owner: str, session: str) -> Lineage | None:
        return next((x for x in self.model if (x.owner, x.session) == (owner, session)), None)

    names = {"owner": st.sampled_from("ab"), "session": st.sampled_from("xyz")}  # noqa: RUF012

    @rule(**names, n=st.integers(0, 22))
    def put(self, owner: str, session: str, n: int) -> None:
        new = lineage(owner, session, n)
        if n > self.max_tokens:
            with pytest.raises(ValueError, match=f"has {n} tokens, more than"):
                self.held.put(new)
            return
        wanted = [x for x in self.model if self.now - x.touched > 10]
        self.model = [x for x in self.model if x not in wanted]
        if old := self.find(owner, session):
            self.model.remove(old)
        self.model.append(new)
        while (
            len(self.model) > self.max_sessions
            or sum(len(x.tokens) for x in self.model) > self.max_tokens
        ):
            wanted.append(self.model.pop(0))
        assert self.held.put(new) == wanted
        assert new in list(self.held) and new.created == new.touched == self.now

    @rule(**names)
    def get(self, owner: str, session: str) -> None:
        wanted = self.find(owner, session)
        expired = wanted is not None and self.now - wanted.touched > 10
        got = self.held.get(owner, session)
        assert got is (None if expired else wanted)
        if got:
            assert got.touched == self.now
            self.model.remove(got)
            self.model.append(got)

    @rule(**names)
    def drop(self, owner: str, session: str) -> None:
        wanted = self.find(owner, session)
        assert self.held.drop(owner, session) is wanted
        if wanted:
            self.model.remove(wanted)

    @rule()
    def expire(self) -> None:
        wanted = [x for x in self.model if self.now - x.touched > 10]
        assert self.held.expire() == wanted
        self.model = [x for x in self.model if x not in wanted]

    @rule(seconds=st.integers(1, 11))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "held"):
            return
        assert list(self.held) == self.model
        assert len(self.held) == len(self.model) <= self.max_sessions
        assert self.held.tokens == sum(len(x.tokens) for x in self.model) <= self.max_tokens


TestLineages = LineagesMachine.TestCase


def test_one_owner_does_not_see_the_session_of_another() -> None:
    """I8."""
    held = Lineages(4, 100, 60)
    held.put(lineage("alice", "run"))
    assert held.get("bob", "run") is None and held.drop("bob", "run") is None
    assert held.get("alice", "run") is not None


def test_a_replaced_lineage_keeps_its_birthday_if_told() -> None:
    held = Lineages(4, 100, 60, clock=lambda: 50.0)
    first = lineage("o", "s")
    first.created = 7.0
    assert held.put(first) == [] and first.created == 7.0 and first.touched == 50.0


@pytest.mark.parametrize("bounds", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_bounds_must_be_positive(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="bounds must be positive"):
        Lineages(*bounds)

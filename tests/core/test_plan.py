"""Plans against a model in which every row says what it was computed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from edit_strategies import edits_of
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline.directive import Directive, Edits, Mode
from leyline.plan import Compute, Keep, Plan, make_plan

FORGET, REPAIR = Mode.FORGET, Mode.REPAIR

new_tokens = st.integers(1000, 1005)
"""Not in any source, so that an edit always changes something."""


def prefilled(tokens: Sequence[int], rows: Sequence[int] = ()) -> list[int]:
    """Rows computed behind `rows`. A row's value depends on its token and all rows before it."""
    values = list(rows)
    state = 0
    for value in values:
        state = hash((state, value))
    for token in tokens:
        values.append(hash((state, token)))
        state = hash((state, values[-1]))
    return values


def executed(plan: Plan, source_rows: Sequence[int], target: Sequence[int]) -> list[int]:
    """The target's rows after a plan."""
    rows: list[int] = []
    for segment in plan.segments:
        assert segment.dst == len(rows)
        if isinstance(segment, Keep):
            rows += source_rows[segment.src : segment.src + segment.n]
        else:
            rows = prefilled(target[segment.dst : segment.dst + segment.n], rows)
    return rows


@dataclass
class Case:
    source: list[int]
    edits: Edits
    available: int
    exact: int

    @property
    def target(self) -> list[int]:
        return self.edits.apply(self.source).tolist()

    @property
    def plan(self) -> Plan:
        return make_plan(self.edits, available=self.available, exact=self.exact)

    @property
    def source_rows(self) -> list[int]:
        """Exact ones as prefilled; the amortized ones behind are like nothing else."""
        return [*prefilled(self.source)[: self.exact], *range(-len(self.source), -self.exact)]


@st.composite
def cases(draw: st.DrawFn, modes: tuple[Mode, ...] = tuple(Mode)) -> Case:
    length = draw(st.integers(0, 40))
    edits = draw(edits_of(length, modes=modes, tokens=new_tokens))
    some = st.just(length) | st.integers(0, length)
    return Case(list(range(length)), edits, draw(some), draw(some))


def expected_sources(case: Case) -> list[int | None]:
    """Token by token: the source row that each target row is kept from, None if computed."""
    forgets = any(edit.mode is FORGET for edit in case.edits)
    result: list[int | None] = []
    repair, edited = 0, False
    by_start = {(d.start, d.start == d.end): d for d in case.edits}
    skip_to = 0
    for i in range(len(case.source) + 1):
        for inserts in (True, False):
            if edit := by_start.get((i, inserts)):
                result += [None] * len(edit.replacement)
                repair = max(repair, edit.repair)
                edited, skip_to = True, edit.end
        if i < skip_to or i == len(case.source):
            continue
        kept = i < case.available and not repair
        if forgets and (edited or i >= case.exact):
            kept = False
        repair = max(0, repair - 1)
        result.append(i if kept else None)
    if result:
        result[-1] = None
    return result


@settings(max_examples=500)
@given(cases())
def test_plan_keeps_what_it_should_row_by_row(case: Case) -> None:
    got: list[int | None] = []
    for segment in case.plan.segments:
        if isinstance(segment, Keep):
            got += range(segment.src, segment.src + segment.n)
        else:
            got += [None] * segment.n
    assert got == expected_sources(case)


@settings(max_examples=300)
@given(cases())
def test_plan_covers_the_target_once_and_keeps_only_equal_tokens(case: Case) -> None:
    plan, target = case.plan, case.target
    neighbours = pairwise(plan.segments)
    at = 0
    for segment in plan.segments:
        assert segment.dst == at and segment.n > 0
        at += segment.n
        if isinstance(segment, Keep):
            assert segment.src + segment.n <= case.available
            assert segment.shift == segment.dst - segment.src
            kept = case.source[segment.src : segment.src + segment.n]
            assert kept == target[segment.dst : at]
    assert not any(isinstance(a, Compute) and isinstance(b, Compute) for a, b in neighbours)
    assert at == plan.target_length == len(target)
    assert plan.shared + plan.moved + plan.computed == len(target)
    assert plan.keeps + plan.computes == tuple(
        sorted(plan.segments, key=lambda s: isinstance(s, Compute))
    )
    if target:
        assert isinstance(plan.segments[-1], Compute)


@settings(max_examples=500)
@given(cases())
def test_amortized_from_is_the_first_row_unlike_a_fresh_prefill(case: Case) -> None:
    rows = executed(case.plan, case.source_rows, case.target)
    fresh = prefilled(case.target)
    unlike = [i for i, row in enumerate(rows) if row != fresh[i]]
    assert case.plan.amortized_from == (unlike[0] if unlike else len(fresh))
    assert unlike == list(range(case.plan.amortized_from, len(fresh)))


@settings(max_examples=300)
@given(cases())
def test_forget_is_a_fresh_engine(case: Case) -> None:
    """I5: whatever was amortized and whatever else is edited, all rows are a prefill's."""
    if not any(edit.mode is FORGET for edit in case.edits):
        return
    plan = case.plan
    assert executed(plan, case.source_rows, case.target) == prefilled(case.target)
    assert plan.moved == 0 and plan.amortized_from == plan.target_length
    assert plan.shared <= min(case.exact, case.edits[0].start)


@given(cases(modes=(REPAIR,)))
def test_repair_of_nothing_amortizes_and_of_all_computes_all(case: Case) -> None:
    """Design: w = 0 is AMORTIZE; a w larger than the rest computes everything behind."""

    def with_width(mode: Mode, width: int) -> Plan:
        edits = [Directive(d.start, d.end, d.replacement, mode, width) for d in case.edits]
        return make_plan(Edits.of(edits, len(case.source)), available=case.available)

    assert with_width(REPAIR, 0) == with_width(Mode.AMORTIZE, 0)
    assert with_width(REPAIR, 1000).segments == with_width(FORGET, 0).segments


def test_an_edit_in_the_middle() -> None:
    edits = Edits.of([Directive(10, 20, (1, 2, 3)), Directive(40, 40, (4, 5))], 50)
    plan = make_plan(edits)
    assert plan.segments == (
        Keep(0, 0, 10),
        Compute(10, 3),
        Keep(20, 13, 20),
        Compute(33, 2),
        Keep(40, 35, 9),
        Compute(44, 1),
    )
    assert (plan.shared, plan.moved, plan.computed) == (10, 29, 6)
    assert plan.keeps[1].shift == -7 and plan.amortized_from == 13


def test_kept_behind_an_edit_counts_as_moved_though_it_stays_in_place() -> None:
    plan = make_plan(Edits.of([Directive(0, 2, (7, 8))], 10))
    assert plan.segments == (Compute(0, 2), Keep(2, 2, 7), Compute(9, 1))
    assert (plan.shared, plan.moved, plan.amortized_from) == (0, 7, 2)


def test_deletion_at_the_front_shares_nothing() -> None:
    plan = make_plan(Edits.of([Directive(0, 2)], 10))
    assert plan.segments == (Keep(2, 0, 7), Compute(7, 1))
    assert (plan.shared, plan.moved, plan.amortized_from) == (0, 7, 0)


def test_new_tokens_only_are_exact() -> None:
    """I1: a prompt that only grows is the plain prefix cache."""
    plan = make_plan(Edits.of([Directive(10, 10, (7, 8))], 10))
    assert plan.segments == (Keep(0, 0, 10), Compute(10, 2))
    assert plan.amortized_from == 12
    assert make_plan(Edits.of([Directive(10, 10, (7, 8))], 10), exact=6).amortized_from == 6


def test_repair_goes_on_behind_the_next_edit() -> None:
    edits = Edits.of([Directive(2, 3, (), REPAIR, 5), Directive(6, 7)], 20)
    assert make_plan(edits).segments == (
        Keep(0, 0, 2),
        Compute(2, 5),
        Keep(9, 7, 10),
        Compute(17, 1),
    )


@pytest.mark.parametrize("length", [0, 1])
def test_smallest_targets(length: int) -> None:
    plan = make_plan(Edits.of((), length))
    assert plan.segments == (() if not length else (Compute(0, 1),))
    assert plan.amortized_from == plan.target_length == length


def test_negative_counts_are_refused() -> None:
    edits = Edits.of((), 5)
    with pytest.raises(ValueError, match="available is -1"):
        make_plan(edits, available=-1)
    with pytest.raises(ValueError, match="exact is -2"):
        make_plan(edits, exact=-2)
    assert make_plan(edits, available=99, exact=99) == make_plan(edits)

"""Which cached rows a prompt takes, from counts alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leyline.directive import Directive, Edits
from leyline.lineage import Lineage, Span
from leyline.plan import Compute, Keep
from leyline.reuse import Reuse, compute_instead, fewer_runs, reuse


def runs_of(plan: Reuse) -> list[list[Keep]]:
    """Kept rows that follow computed ones, run by run."""
    runs: list[list[Keep]] = []
    behind = False
    for segment in plan.plan.segments:
        if isinstance(segment, Compute):
            behind = True
        elif behind:
            runs.append([segment])
            behind = False
        elif runs:
            runs[-1].append(segment)
    return runs


@st.composite
def plans(draw: st.DrawFn) -> Reuse:
    """A source of 300 tokens with many small edits."""
    starts = sorted(draw(st.sets(st.integers(5, 290), max_size=40)))
    edits, at = [], 0
    for start, end in pairwise([*starts, 300]):
        removed = draw(st.integers(0, min(6, end - start)))
        written = tuple(range(draw(st.integers(0 if removed else 1, 3))))
        if start >= at:
            edits.append(Directive(start, start + removed, written))
            at = start + removed + (removed == 0)
    tokens = np.arange(300)
    lineage = Lineage("", "s", tokens, tokens, (Span(0, 300, True, 0),))
    whole = Edits.of([*edits, Directive(300, 300, (1, 2))], 300)
    return reuse(whole, lineage, exact=draw(st.integers(0, 5)), source=300)


@given(plans(), st.integers(0, 12))
def test_fewer_runs_keeps_the_longest(whole: Reuse, most: int) -> None:
    few = fewer_runs(whole, most)
    before, after = runs_of(whole), runs_of(few)
    assert len(after) == min(most, len(before))
    lengths = sorted((sum(keep.n for keep in run) for run in before), reverse=True)
    assert sorted((sum(k.n for k in run) for run in after), reverse=True) == lengths[:most]
    assert set(few.moved) <= set(whole.moved)
    assert (few.shared, few.plan.target_length) == (whole.shared, whole.plan.target_length)
    at, last = 0, None
    for segment in few.plan.segments:  # all of the prompt, in order, computed parts merged
        assert segment.dst == at and segment.n > 0
        assert not (isinstance(segment, Compute) and isinstance(last, Compute))
        at, last = at + segment.n, segment
    assert at == few.plan.target_length


@given(plans())
def test_enough_runs_change_nothing(whole: Reuse) -> None:
    assert fewer_runs(whole, len(runs_of(whole))) is whole


@given(plans())
def test_all_computed_instead(whole: Reuse) -> None:
    none = compute_instead(whole, set(whole.moved))
    assert none.moved == ()
    assert none.plan.computed == whole.plan.computed + sum(keep.n for keep in whole.moved)

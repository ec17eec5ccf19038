"""A prompt's outline says what its plan does."""

from __future__ import annotations

import numpy as np
from edit_strategies import edits_of
from hypothesis import given
from hypothesis import strategies as st

from leyline.directive import Edits, Mode
from leyline.outline import Kind, evicted_by, parts_of, redone_by
from leyline.plan import make_plan

LENGTH = 40
MODES = (Mode.AMORTIZE, Mode.REPAIR)


@given(edits_of(LENGTH, modes=MODES), st.integers(0, LENGTH), st.booleans())
def test_parts_cover_the_prompt_and_count_as_the_plan(
    edits: Edits, available: int, copied: bool
) -> None:
    if edits.target_length == 0:
        return
    plan = make_plan(edits, available=available)
    parts = parts_of(plan, plan.shared, copied, redone_by(edits))
    ends = [part.start + part.n for part in parts]
    assert [part.start for part in parts] == [0, *ends[:-1]]
    assert ends[-1] == edits.target_length and all(part.n > 0 for part in parts)
    counts = {kind: sum(part.n for part in parts if part.kind == kind) for kind in Kind}
    assert counts[Kind.SHARED] == plan.shared
    assert counts[Kind.COPIED if copied else Kind.MOVED] == plan.moved
    assert counts[Kind.COMPUTED] + counts[Kind.REPAIRED] == plan.computed


@given(edits_of(LENGTH, modes=MODES))
def test_repaired_are_the_tokens_computed_though_they_were_kept(edits: Edits) -> None:
    """With all rows there, all that is computed else is new, or the last token."""
    if edits.target_length == 0:
        return
    plan = make_plan(edits)
    parts = parts_of(plan, plan.shared, False, redone_by(edits))
    new = sum(len(edit.replacement) for edit in edits)
    computed = sum(part.n for part in parts if part.kind == Kind.COMPUTED)
    assert new <= computed <= new + 1


@given(edits_of(LENGTH))
def test_evicted_and_kept_tokens_make_up_the_source(edits: Edits) -> None:
    source = np.arange(LENGTH)
    evicted = evicted_by(edits, source, forget=False)
    gone = [int(token) for each in evicted for token in each.tokens]  # type: ignore[union-attr]
    marked = edits.apply(source + 1000)
    kept = [int(token) - 1000 for token in marked if token >= 1000]
    assert sorted([*gone, *kept]) == list(range(LENGTH))
    for each in evicted:
        # What replaces it is there in the prompt, behind what was kept before it.
        here = edits.apply(source)[each.at : each.at + each.replacement].tolist()
        assert here == next(
            list(e.replacement) for e in edits if e.start == each.start and e.end > e.start
        )
    assert all(each.tokens is None for each in evicted_by(edits, source, forget=True))

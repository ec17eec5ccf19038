"""`answers`: when leaving the rotation out is clearly worse than the splice."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from leyline.verify import answers
from leyline.verify.student import quantile


@pytest.mark.parametrize(
    ("freedom", "value"), [(9, 2.821), (10, 2.764), (20, 2.528), (40, 2.423), (10**6, 2.326)]
)
def test_quantiles_of_students_t(freedom: int, value: float) -> None:
    """As in printed tables."""
    assert round(quantile(0.99, freedom), 3) == value
    assert quantile(0.01, freedom) == pytest.approx(-quantile(0.99, freedom))


def test_students_t_needs_a_degree_of_freedom() -> None:
    with pytest.raises(ValueError, match="1 degree of freedom or more, not 0"):
        quantile(0.99, 0)


@pytest.mark.parametrize(("turns", "asked"), [(1, None), (9, None), (10, 2.821), (21, 2.528)])
def test_the_control_has_to_be_clear_for_its_turns(turns: int, asked: float | None) -> None:
    """Fewer turns ask for more standard errors, and too few for nothing."""
    splice = [_said(i, 1.0) for i in range(turns)]
    unclear = [_said(i, 1.0 + (-1) ** i) for i in range(turns)]
    clear = [_said(i, 9.0 + (-1) ** i) for i in range(turns)]
    for control, met in ((unclear, False), (clear, True)):
        row = answers._clear(control, splice)
        if asked is None:
            assert row.met is None and "chance" not in row.what
            continue
        assert row.at_least == pytest.approx(asked, abs=5e-4) and row.met is met
        assert row.value == answers.standard_errors(control, splice)
        assert f"({asked:.3g}: by chance once in a hundred, if turns were ind" in row.what


def _said(turn: int, nll: float) -> answers.Said:
    return answers.Said("s", turn, 2, nll, (), 0, True)

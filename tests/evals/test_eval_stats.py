"""Intervals and tests against published values and against their definitions."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.evals.stats import mcnemar, paired_interval, wilson

Z = 1.959963984540054


@pytest.mark.parametrize(
    ("solved", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_published_values(solved: int, n: int, low: float, high: float) -> None:
    """Those of R. G. Newcombe, "Two-sided confidence intervals for the single proportion", 1998."""
    found = wilson(solved, n)
    assert found is not None
    assert found == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_bounds_are_z_of_their_own_standard_errors_away(case: tuple[int, int]) -> None:
    solved, n = case
    found = wilson(solved, n)
    assert found is not None
    low, high = found
    assert 0 <= low <= solved / n <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:
            away = abs(solved / n - bound)
            assert away == pytest.approx(Z * sqrt(bound * (1 - bound) / n), rel=1e-6, abs=1e-9)


def test_wilson_of_nothing_and_of_nonsense() -> None:
    assert wilson(0, 0) is None
    with pytest.raises(ValueError, match="3 solved of 2"):
        wilson(3, 2)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [(0, 0, 1), (1, 1, 1), (5, 0, 1 / 16), (0, 6, 1 / 32), (8, 2, 112 / 1024), (9, 1, 22 / 1024)],
)
def test_mcnemar_counts_coin_tosses(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == pytest.approx(p)


@given(st.integers(0, 5), st.integers(0, 5))
def test_mcnemar_is_the_share_of_tosses_as_uneven(first: int, second: int) -> None:
    """All ways that first + second tosses can fall, counted one by one."""
    n = first + second
    uneven = abs(first - second)
    as_uneven = sum(abs(2 * sum(toss) - n) >= uneven for toss in product((0, 1), repeat=n))
    assert mcnemar(first, second) == pytest.approx(float(Fraction(as_uneven, 2**n)))


def test_paired_interval_is_that_of_all_draws_of_tasks() -> None:
    """With three tasks there are 27 draws: the interval is between their quantiles."""
    tasks = {"a": [1, 1], "b": [0, 1], "c": [-1, 0]}
    means = [
        np.mean(np.concatenate([list(tasks.values())[i] for i in draw]))
        for draw in product(range(3), repeat=3)
    ]
    found = paired_interval(tasks, level=0.8)
    assert found is not None
    exact = np.quantile(means, (0.1, 0.9))
    assert found == pytest.approx(tuple(exact), abs=1e-9)


def test_paired_interval_keeps_a_tasks_seeds_together() -> None:
    """Many seeds of few tasks don't make it narrow; drawing seeds by themselves would."""
    tasks = {"a": [1] * 50, "b": [0] * 50}
    assert paired_interval(tasks) == (0.0, 1.0)
    found = paired_interval({"a": [1, 0] * 50})
    assert found is not None and 0.3 < found[0] < 0.5 < found[1] < 0.7


def test_paired_interval_of_nothing_and_of_no_difference() -> None:
    assert paired_interval({}) is None and paired_interval({"a": []}) is None
    assert paired_interval({"a": [0, 0], "b": [0]}) == (0.0, 0.0)

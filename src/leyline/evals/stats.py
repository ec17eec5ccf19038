"""How sure a solve rate is, and a difference between two of them.

Wilson's interval for one rate: E. B. Wilson, "Probable inference, the law of succession, and
statistical inference", JASA 22 (1927). McNemar's exact test for pairs: Q. McNemar, Psychometrika 12
(1947), its binomial form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb, sqrt
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
RESAMPLES = 10_000
_SEED = 20260


def wilson(solved: int, n: int, level: float = LEVEL) -> tuple[float, float] | None:
    """The interval for a rate of `solved` in `n`; None where n is 0.

    The rates p for which solved / n is within z standard errors, p's own: (x/n - p)² = z²p(1-p)/n.
    """
    if not 0 <= solved <= n:
        raise ValueError(f"{solved} solved of {n} is no rate")
    if n == 0:
        return None
    z = NormalDist().inv_cdf((1 + level) / 2)
    rate, share = solved / n, z * z / n
    middle = (rate + share / 2) / (1 + share)
    half = z * sqrt(rate * (1 - rate) / n + share / (4 * n)) / (1 + share)
    low = 0.0 if solved == 0 else middle - half
    high = 1.0 if solved == n else middle + half
    return low, high


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value that pairs which differ fall to either side alike; 1 where none do."""
    n = only_first + only_second
    if n == 0:
        return 1.0
    below = sum(comb(n, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * below / 2**n)


def paired_interval(
    differences: Mapping[str, Sequence[int]], level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Percentile bootstrap of the mean difference. differences: by task, one of -1, 0 and 1 for
    each seed.

    Tasks are drawn, each with all its seeds, as seeds of one task are alike; with a single task its
    seeds are. None without a difference to draw. The same input gives the same interval.
    """
    groups = [np.array(values, dtype=np.float64) for values in differences.values() if len(values)]
    if not groups:
        return None
    if len(groups) == 1:
        groups = [groups[0][i : i + 1] for i in range(len(groups[0]))]
    sums = np.array([group.sum() for group in groups])
    sizes = np.array([len(group) for group in groups])
    drawn = np.random.default_rng(_SEED).integers(0, len(groups), (resamples, len(groups)))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(means, ((1 - level) / 2, (1 + level) / 2)).tolist()
    return low, high

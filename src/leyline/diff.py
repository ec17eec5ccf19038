"""Edits from two token sequences.

Kept are the common prefix and runs of at least `min_keep` tokens, in order. As in patience diff,
runs are found at `min_keep`-grams that occur once on each side; the heaviest chain of them that
keeps its order is fixed and extended as far as tokens agree, and the search goes on between its
runs, where more grams are unique. Where none is, the r-th occurrences are paired. Grams are
compared by hash, runs by their tokens: a collision can cost a run, never keep a wrong token.

A kept row has never read the new tokens that now stand before it. So where one run or another can
be kept, new tokens before it count against it: a tool output that comes again behind a long stretch
of other text is new, rather than the old one moved behind text that it has not seen.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from .directive import (
    Directive,
    DirectiveError,
    Edits,
    Mode,
    TokenArray,
    check_mode,
    check_number,
    to_tokens,
)

SAMPLE_FROM = 1 << 14
"""Inputs longer than this are first searched at one gram in 16 (picked by its hash)."""
MAX_GROUPS = 1 << 14
"""Most candidates that a chain is sought among; the longest are taken."""
MAX_WORK = 4
"""Grams looked at, in multiples of the input: what keeps hostile inputs near-linear."""
UNSEEN = 4
"""Kept tokens that one new token before them must be worth, where there is a choice."""


def derive_edits(
    source: TokenArray,
    target: TokenArray,
    *,
    min_keep: int = 16,
    mode: Mode = Mode.AMORTIZE,
    repair: int = 0,
) -> Edits:
    """Edits, all of one mode, with `apply(source) == target`.

    Every kept run except the common prefix has at least `min_keep` tokens. New tokens at the end
    are an ordinary edit. Raises DirectiveError for bad tokens or settings.
    """
    old, new = to_tokens(source, "source"), to_tokens(target, "target")
    if check_number(min_keep, "min_keep") < 1:
        raise DirectiveError("min_keep", "0 is too small; a kept run has at least 1 token.")
    mode, repair = check_mode(mode, repair)
    kept = _kept(old, new, min_keep)
    gaps = zip(
        np.append(0, kept.i + kept.n).tolist(),
        np.append(kept.i, len(old)).tolist(),
        np.append(0, kept.j + kept.n).tolist(),
        np.append(kept.j, len(new)).tolist(),
        strict=True,
    )
    return Edits._trusted(
        (
            Directive(i0, i1, tuple(new[j0:j1].tolist()), mode, repair)
            for i0, i1, j0, j1 in gaps
            if i0 < i1 or j0 < j1
        ),
        len(old),
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    """Equal tokens `source[i:i+n] == target[j:j+n]`; three int64 arrays, in order."""

    i: np.ndarray
    j: np.ndarray
    n: np.ndarray

    def __getitem__(self, index: np.ndarray | slice) -> _Runs:
        return _Runs(self.i[index], self.j[index], self.n[index])


@dataclass(frozen=True, slots=True)
class _Regions:
    """What is still open: source `[i0, i1)` against target `[j0, j1)`; int64 arrays, in order."""

    i0: np.ndarray
    i1: np.ndarray
    j0: np.ndarray
    j1: np.ndarray

    def __getitem__(self, index: np.ndarray) -> _Regions:
        return _Regions(self.i0[index], self.i1[index], self.j0[index], self.j1[index])

    @property
    def smaller(self) -> np.ndarray:
        """Tokens of the smaller side."""
        return np.minimum(self.i1 - self.i0, self.j1 - self.j0)

    def at_least(self, n: int) -> _Regions:
        return self[self.smaller >= n]


def _kept(source: np.ndarray, target: np.ndarray, min_keep: int) -> _Runs:
    """All runs to keep, joined where they touch."""
    whole = _Regions(*(np.array([x]) for x in (0, len(source), 0, len(target))))
    prefix = int(_common_prefix(source, target, whole)[0])
    whole = _Regions(whole.i0 + prefix, whole.i1, whole.j0 + prefix, whole.j1)
    suffix = int(_common_suffix(source, target, whole)[0])
    suffix = suffix if suffix >= min_keep else 0
    whole = _Regions(whole.i0, whole.i1 - suffix, whole.j0, whole.j1 - suffix)
    found = [
        _Runs(*(np.array([x]) for x in (0, 0, prefix))),
        _Runs(whole.i1, whole.j1, np.array([suffix])),
    ]
    found += _search(source, target, whole, min_keep)
    runs = _Runs(*(np.concatenate([getattr(f, x) for f in found]) for x in "ijn"))
    runs = runs[runs.n > 0]
    runs = runs[np.argsort(runs.i)]
    joins = (runs.i[1:] == (runs.i + runs.n)[:-1]) & (runs.j[1:] == (runs.j + runs.n)[:-1])
    if not len(runs.i):
        return runs
    first = np.flatnonzero(np.append(True, ~joins))
    return _Runs(runs.i[first], runs.j[first], np.add.reduceat(runs.n, first))


def _search(
    source: np.ndarray, target: np.ndarray, regions: _Regions, min_keep: int
) -> list[_Runs]:
    """Runs within one region whose ends have been stripped."""
    regions = regions.at_least(min_keep)
    if not len(regions.i0):
        return []
    end = int(regions.i1[0]), int(regions.j1[0])
    hashes = _gram_hashes(source, min_keep), _gram_hashes(target, min_keep)
    sampled = len(source) + len(target) > SAMPLE_FROM
    # Once something is kept, more can only be kept before it, where new tokens are counted already.
    open_end = end == (len(source), len(target))
    found = []
    budget = MAX_WORK * (len(source) + len(target))
    while len(regions.i0) and budget > 0:
        i, j, looked_at = _pairs(hashes, regions, min_keep, sampled)
        budget -= looked_at
        anchors = _verified(
            source, target, _chain(source, target, regions, i, j, min_keep, open_end)
        )
        if len(anchors.i):
            regions = _split(regions, anchors)
            regions, prefixes, suffixes = _strip(source, target, regions, end)
            regions = regions.at_least(min_keep)
            found += [anchors, prefixes, suffixes]
            open_end = False
        elif not sampled:
            break
        sampled = False
    return found


def _gram_hashes(tokens: np.ndarray, k: int) -> np.ndarray:
    """uint64 `[len(tokens) - k + 1]`: hash of the k tokens from each place on."""
    h = _mixed(tokens.astype(np.uint64) + np.uint64(1))
    width = 1
    while width < k:
        step = min(width, k - width)  # the two halves may overlap
        h = _mixed(h[:-step]) + h[step:]
        width += step
    return h


def _mixed(h: np.ndarray) -> np.ndarray:
    h = h * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(32)
    h *= np.uint64(0xD6E8FEB86659FD93)
    return h


def _pairs(
    hashes: tuple[np.ndarray, np.ndarray], regions: _Regions, k: int, sampled: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Places (i, j) of equal grams within a region, by i, and the number of grams looked at."""
    i, i_region = _places(hashes[0], regions.i0, regions.i1, k, sampled)
    j, j_region = _places(hashes[1], regions.j0, regions.j1, k, sampled)
    total = len(i) + len(j)
    if not len(i) or not len(j):
        return i[:0], j[:0], total
    keys = np.concatenate([hashes[0][i], hashes[1][j]])
    if len(regions.i0) > 1:  # the same gram elsewhere is another gram
        keys += _mixed(np.concatenate([i_region, j_region]).astype(np.uint64))
    # Number in the low bits: sorting values is much faster than argsort, and it is stable.
    bits = np.uint64(total.bit_length())
    keys = (keys >> bits << bits) | np.arange(total, dtype=np.uint64)
    keys.sort()
    number = (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    keys >>= bits
    same = keys[1:] == keys[:-1]
    is_source = number < len(i)
    # In each group of equal grams, those of the source come first.
    last = np.flatnonzero(same & is_source[:-1] & ~is_source[1:])
    first_of_group = np.concatenate([[True], ~same, [True]])
    unique = first_of_group[last] & first_of_group[last + 2]
    a, b = last[unique], last[unique] + 1
    if not sampled:
        region = i_region[number[last]]
        has_unique = np.bincount(region[unique], minlength=len(regions.i0)) > 0
        ranked = _ranked(np.flatnonzero(first_of_group), last[~has_unique[region]])
        a, b = np.append(a, ranked[0]), np.append(b, ranked[1])
    a, b = number[a], number[b] - len(i)
    same_region = i_region[a] == j_region[b]
    a, b = i[a[same_region]], j[b[same_region]]
    order = np.argsort(a)
    return a[order], b[order], total


def _places(
    hashes: np.ndarray, starts: np.ndarray, ends: np.ndarray, k: int, sampled: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Places of all grams (or a sample) that lie within a region, and the region of each."""
    counts = ends - starts - k + 1
    places, regions = _ranges(starts, counts), np.repeat(np.arange(len(starts)), counts)
    if sampled:
        chosen = hashes[places] < np.uint64(1 << 60)
        places, regions = places[chosen], regions[chosen]
    return places, regions


def _ranked(groups: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of r-th occurrences. `groups`: where each begins, and the end of all;
    `last`: the last of the source in those wanted."""
    at = np.searchsorted(groups, last, side="right") - 1
    start, end = groups[at], groups[at + 1]
    counts = np.minimum(last + 1 - start, end - last - 1)
    return _ranges(start, counts), _ranges(last + 1, counts)


def _chain(
    source: np.ndarray,
    target: np.ndarray,
    regions: _Regions,
    i: np.ndarray,
    j: np.ndarray,
    k: int,
    open_end: bool,
) -> _Runs:
    """The heaviest chain of runs among pairs of k-grams, cut so that no two overlap.

    open_end: there is one region, and nothing is kept behind it.
    """
    if not len(i):
        return _Runs(i, j, i)
    first = np.flatnonzero(np.append(True, (np.diff(j - i) != 0) | (np.diff(i) > k)))
    last = np.append(first[1:], len(i)) - 1
    runs = _Runs(i[first], j[first], i[last] - i[first] + k)
    # Neighbours on one diagonal are chosen together.
    group = np.cumsum(np.append(0, np.diff(runs.j - runs.i) != 0))
    head = np.flatnonzero(np.append(True, np.diff(group) != 0))
    tail = np.append(head[1:], len(group)) - 1
    lo, hi = j[first[head]], j[last[tail]]
    if np.all(hi[:-1] < lo[1:]):
        return _without_overlap(runs, k)
    spans = _Regions(i[first[head]], i[last[tail]] + k, lo, hi + k)
    among = np.arange(len(head))
    if len(head) > MAX_GROUPS:
        among = np.sort(np.argpartition(-spans.smaller, MAX_GROUPS)[:MAX_GROUPS])
    weight = _weights(source, target, regions, spans[among])
    best = _heaviest(lo[among].tolist(), hi[among].tolist(), weight.tolist(), open_end)
    chosen = np.zeros(len(head), dtype=bool)
    chosen[among[best]] = True
    return _without_overlap(runs[chosen[group]], k)


def _weights(
    source: np.ndarray, target: np.ndarray, regions: _Regions, spans: _Regions
) -> np.ndarray:
    """Tokens that agree within each span, and on from its ends within its region.

    They tell text that stayed from text that only recurs: most of what stayed is not unique.
    """
    n = spans.smaller
    differ = _differ(source, target, spans.i0, spans.j0, n, 1)
    within = n - np.add.reduceat(differ, np.cumsum(n) - n, dtype=np.int64)
    most = len(source) // len(n)  # looked at for each end, so that all together are linear
    at = np.searchsorted(regions.i0, spans.i0, side="right") - 1
    region = regions[at]
    before = np.minimum(spans.i0 - region.i0, spans.j0 - region.j0)
    behind = np.minimum(region.i1 - spans.i1, region.j1 - spans.j1)
    before = np.minimum(before, most)
    behind = np.clip(behind, 0, most)  # a span may go on into the next region
    within += _agreeing(source, target, spans.i0 - 1, spans.j0 - 1, before, -1)
    return within + _agreeing(source, target, spans.i1, spans.j1, behind, 1)


def _heaviest(lo: list[int], hi: list[int], weight: list[int], open_end: bool) -> list[int]:
    """Heaviest subsequence in which each `lo` is past the `hi` before it. O(n log n).

    open_end: what is passed over in the target counts against the last one.
    """
    # By `hi`, the weight of the best chain ending there; both rise.
    ends: list[int] = []
    weights: list[int] = []
    items: list[int] = []
    before: list[int] = []
    for item, (low, high, w) in enumerate(zip(lo, hi, weight, strict=True)):
        at = bisect_left(ends, low)
        total = w + (weights[at - 1] if at else 0)
        before.append(items[at - 1] if at else -1)
        at = bisect_left(ends, high + 1)
        if at and weights[at - 1] >= total:
            continue
        at = bisect_left(ends, high)
        stop = at
        while stop < len(ends) and weights[stop] <= total:
            stop += 1
        ends[at:stop] = [high]
        weights[at:stop] = [total]
        items[at:stop] = [item]
    chosen = []
    item = items[-1] if items else -1
    if open_end and items:
        worth = [(1 + UNSEEN) * w - UNSEEN * end for w, end in zip(weights, ends, strict=True)]
        item = items[worth.index(max(worth))]
    while item >= 0:
        chosen.append(item)
        item = before[item]
    return chosen[::-1]


def _without_overlap(runs: _Runs, k: int) -> _Runs:
    """Cut from each run what the one before it covers; drop what is then shorter than k."""
    over = np.maximum((runs.i + runs.n)[:-1] - runs.i[1:], (runs.j + runs.n)[:-1] - runs.j[1:])
    over = np.maximum(np.append(0, over), 0) if len(runs.i) else runs.i
    cut = _Runs(runs.i + over, runs.j + over, runs.n - over)
    return cut[cut.n >= k]


def _verified(source: np.ndarray, target: np.ndarray, runs: _Runs) -> _Runs:
    """Runs whose tokens are equal, not only their hashes."""
    tokens = _Regions(runs.i, runs.i + runs.n, runs.j, runs.j + runs.n)
    return runs[_common_prefix(source, target, tokens) == runs.n]


def _split(regions: _Regions, runs: _Runs) -> _Regions:
    """What the runs leave open of the regions that they lie in."""
    return _Regions(
        np.sort(np.append(regions.i0, runs.i + runs.n)),
        np.sort(np.append(regions.i1, runs.i)),
        np.sort(np.append(regions.j0, runs.j + runs.n)),
        np.sort(np.append(regions.j1, runs.j)),
    )


def _strip(
    source: np.ndarray, target: np.ndarray, regions: _Regions, end: tuple[int, int]
) -> tuple[_Regions, _Runs, _Runs]:
    """Regions without the tokens on which their ends agree, which extend the runs beside them."""
    n = _common_prefix(source, target, regions)
    prefixes = _Runs(regions.i0, regions.j0, n)
    regions = _Regions(regions.i0 + n, regions.i1, regions.j0 + n, regions.j1)
    n = _common_suffix(source, target, regions)
    # No run is behind the last region: its suffix was looked at before.
    n[(regions.i1 == end[0]) & (regions.j1 == end[1])] = 0
    suffixes = _Runs(regions.i1 - n, regions.j1 - n, n)
    return _Regions(regions.i0, regions.i1 - n, regions.j0, regions.j1 - n), prefixes, suffixes


def _common_prefix(source: np.ndarray, target: np.ndarray, regions: _Regions) -> np.ndarray:
    """Tokens on which source and target agree from the start of each region, int64."""
    return _agreeing(source, target, regions.i0, regions.j0, regions.smaller, 1)


def _common_suffix(source: np.ndarray, target: np.ndarray, regions: _Regions) -> np.ndarray:
    """The same from the end."""
    return _agreeing(source, target, regions.i1 - 1, regions.j1 - 1, regions.smaller, -1)


def _agreeing(
    source: np.ndarray, target: np.ndarray, i: np.ndarray, j: np.ndarray, n: np.ndarray, step: int
) -> np.ndarray:
    """For each (i, j), how many tokens agree from there on in direction `step`, at most n."""
    differ = _differ(source, target, i, j, n, step)
    at = np.append(np.flatnonzero(differ), len(differ))
    start = np.cumsum(n) - n
    return np.minimum(at[np.searchsorted(at, start)] - start, n)


def _differ(
    source: np.ndarray, target: np.ndarray, i: np.ndarray, j: np.ndarray, n: np.ndarray, step: int
) -> np.ndarray:
    """Whether tokens differ, for n from each (i, j) in direction `step`, one after the other."""
    steps = step * (np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n))
    return source[np.repeat(i, n) + steps] != target[np.repeat(j, n) + steps]


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`start, start+1, …` for each count, one after the other."""
    bounds = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - bounds, counts)

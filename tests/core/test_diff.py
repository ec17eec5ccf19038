"""Edits derived from two token sequences."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from edit_strategies import edits_of
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline import diff
from leyline.bench import diff as bench
from leyline.diff import derive_edits
from leyline.directive import Directive, DirectiveError, Edits, Mode


def kept_runs(edits: Edits) -> list[tuple[int, int, int]]:
    """(source, target, length) of what no edit touches."""
    runs, i, j = [], 0, 0
    for d in (*edits, Directive(edits.source_length, edits.source_length)):
        if d.start > i:
            runs.append((i, j, d.start - i))
        j += d.start - i + len(d.replacement)
        i = d.end
    return runs


def kept_tokens(edits: Edits) -> int:
    return sum(n for _, _, n in kept_runs(edits))


def most_kept(source: list[int], target: list[int], min_keep: int) -> int:
    """Dynamic programme over all alignments: the most tokens that runs allowed can keep."""
    best = np.zeros((len(source) + 1, len(target) + 1), dtype=int)
    equal = np.zeros_like(best)  # tokens that agree up to here
    run = np.full_like(best, -1)  # the most kept with a run, long enough, that ends here
    run[0, 0] = 0  # the common prefix may be any length
    for i in range(len(source) + 1):
        for j in range(len(target) + 1):
            if i and j and source[i - 1] == target[j - 1]:
                equal[i, j] = equal[i - 1, j - 1] + 1
                if run[i - 1, j - 1] >= 0:
                    run[i, j] = run[i - 1, j - 1] + 1
                if equal[i, j] >= min_keep:
                    run[i, j] = max(run[i, j], best[i - min_keep, j - min_keep] + min_keep)
            best[i, j] = max(run[i, j], best[i - 1, j] if i else 0, best[i, j - 1] if j else 0)
    return int(best[-1, -1])


def check(source: list[int] | np.ndarray, target: list[int] | np.ndarray, min_keep: int) -> Edits:
    """All that is promised of every diff."""
    edits = derive_edits(source, target, min_keep=min_keep)
    assert edits.apply(source).tolist() == list(target)
    assert Edits.of(edits, len(source)) == edits
    for i, j, n in kept_runs(edits):
        assert n >= min_keep or i == j == 0
    common = 0
    while common < min(len(source), len(target)) and source[common] == target[common]:
        common += 1
    first = kept_runs(edits)[0] if common else None
    assert first is None or first == (0, 0, common)
    return edits


# --- properties ---------------------------------------------------------------------------------


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 6),
)
def test_apply_undoes_diff(source: list[int], target: list[int], min_keep: int) -> None:
    edits = check(source, target, min_keep)
    assert kept_tokens(edits) <= most_kept(source, target, min_keep)


@settings(max_examples=300)
@given(st.data(), st.integers(0, 3), st.integers(1, 5))
def test_diff_undoes_apply(data: st.DataObject, symbols: int, min_keep: int) -> None:
    """diff of what edits made gives edits that make the same."""
    source = data.draw(st.lists(st.integers(0, symbols), max_size=60))
    edits = data.draw(edits_of(len(source)))
    check(source, edits.apply(source).tolist(), min_keep)


@pytest.mark.parametrize("sample_from", [0, diff.SAMPLE_FROM])
@pytest.mark.parametrize("symbols", [1, 2, 5, 300])
def test_long_random_inputs(
    symbols: int, sample_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff, "SAMPLE_FROM", sample_from)
    rng = np.random.default_rng(symbols)
    for _ in range(100):
        source = rng.integers(0, symbols, rng.integers(0, 600)).tolist()
        target = list(source)
        for _ in range(rng.integers(1, 8)):
            at = int(rng.integers(0, len(target) + 1))
            new = rng.integers(0, symbols + 1, rng.integers(0, 30)).tolist()
            target[at : at + int(rng.integers(0, 60))] = new
        check(source, target, int(rng.integers(1, 24)))


@pytest.mark.parametrize("limits", [{"MAX_WORK": 1}, {"MAX_GROUPS": 2}, {"SAMPLE_FROM": 0}])
@given(st.data())
def test_limits_of_the_search_cost_no_correctness(
    limits: dict[str, int], data: st.DataObject
) -> None:
    source = data.draw(st.lists(st.integers(0, 2), max_size=80))
    edits = data.draw(edits_of(len(source)))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(diff, name, value)
        check(source, edits.apply(source).tolist(), 2)


@pytest.mark.parametrize(
    "weak",
    [
        lambda tokens, k: np.zeros(len(tokens) - k + 1, np.uint64),
        lambda tokens, k: tokens[: len(tokens) - k + 1].astype(np.uint64) % np.uint64(2),
        lambda tokens, k: np.arange(len(tokens) - k + 1, dtype=np.uint64),
    ],
    ids=["all collide", "two values", "unrelated grams collide"],
)
@given(
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.integers(0, 5), max_size=60),
    st.integers(1, 4),
)
def test_a_hash_collision_never_keeps_a_wrong_token(
    weak: Callable[[np.ndarray, int], np.ndarray],
    source: list[int],
    target: list[int],
    min_keep: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diff, "_gram_hashes", weak)
        check(source, target, min_keep)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 7))
def test_hashes_tell_grams_apart(tokens: list[int], k: int) -> None:
    if len(tokens) < k:
        return
    hashes = diff._gram_hashes(np.array(tokens), k)
    grams = [tuple(tokens[i : i + k]) for i in range(len(tokens) - k + 1)]
    assert len(hashes) == len(grams)
    assert len(set(hashes.tolist())) == len(set(grams))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8), st.integers(1, 9)), max_size=9))
def test_heaviest_chain_against_all_subsets(items: list[tuple[int, int, int]]) -> None:
    lo = [low for low, _, _ in items]
    hi = [low + n for low, n, _ in items]
    weight = [w for _, _, w in items]

    def heaviest(first: int, past: int) -> int:
        return max(
            (weight[x] + heaviest(x + 1, hi[x]) for x in range(first, len(items)) if lo[x] > past),
            default=0,
        )

    def worth(first: int, past: int) -> int:
        """The weight, less `UNSEEN` for every token passed over up to where the chain ends."""
        return max(
            (
                (1 + diff.UNSEEN) * weight[x] + max(-diff.UNSEEN * hi[x], worth(x + 1, hi[x]))
                for x in range(first, len(items))
                if lo[x] > past
            ),
            default=-(10**9),
        )

    for open_end in (False, True):
        chosen = diff._heaviest(lo, hi, weight, open_end)
        assert chosen == sorted(set(chosen))
        assert all(hi[a] < lo[b] for a, b in pairwise(chosen))
        total = sum(weight[x] for x in chosen)
        if not open_end:
            assert total == heaviest(0, -1)
        elif items:
            end = hi[chosen[-1]]
            assert (1 + diff.UNSEEN) * total - diff.UNSEEN * end == worth(0, -1)


def test_output_that_comes_again_is_new() -> None:
    """The old output was cleared and the same text was printed again: what the agent said in
    between is kept, rather than the old output moved behind text that it has not read."""
    output, said = list(range(1000, 1900)), list(range(3000, 3400))
    source = [*range(50), *output, *said]
    target = [*range(50), 7, 8, 9, *said, *output, 5, 5, 5]
    assert kept_runs(check(source, target, 16)) == [(0, 0, 50), (950, 53, 400)]


# --- how much is kept ---------------------------------------------------------------------------


def _conversation(rng: np.random.Generator, k: int) -> tuple[list[int], list[int]]:
    """Blocks, some of them repeated, with stubs, deletions, insertions and copies."""
    blocks = [rng.integers(0, 1000, rng.integers(k, 3 * k)).tolist() for _ in range(6)]
    order = rng.integers(0, 6, 8) if rng.random() < 0.5 else range(6)
    stub = rng.integers(0, 1000, rng.integers(1, 2 * k)).tolist()
    source: list[int] = []
    target: list[int] = []
    for block in (blocks[x] for x in order):
        source += block
        kind = rng.random()
        if kind < 0.15:
            target += stub
        elif kind < 0.25:
            pass
        elif kind < 0.35:
            cut = int(rng.integers(len(block)))
            target += block[:cut] + rng.integers(0, 1000, 5).tolist() + block[cut:]
        elif kind < 0.45:
            target += block + blocks[rng.integers(6)]
        else:
            target += block
    return source, target


def test_nearly_all_is_kept_that_can_be() -> None:
    """Over small conversations full of repetition, against the best of all alignments."""
    kept = possible = perfect = 0
    for seed in range(150):
        source, target = _conversation(np.random.default_rng(seed), 6)
        ours, best = kept_tokens(check(source, target, 6)), most_kept(source, target, 6)
        assert ours <= best
        kept, possible, perfect = kept + ours, possible + best, perfect + (ours == best)
    assert kept >= 0.99 * possible
    assert perfect >= 0.93 * 150


@pytest.mark.parametrize("length", [400, 3000, 40_000])
def test_known_edits_of_plain_text_are_found_again(length: int) -> None:
    """Replaced by one stub, deleted, grown, at the start and at the end: nothing else is lost."""
    rng = np.random.default_rng(length)
    source = rng.integers(0, 50_000, length)
    stub, grown = tuple(range(60_000, 60_020)), tuple(range(70_000, 70_150))
    at = [length * x // 8 for x in range(8)]
    edits = Edits.of(
        [
            Directive(0, 3, (80_000,)),
            Directive(at[1], at[1] + 25, stub),
            Directive(at[2], at[2] + 20, stub),
            Directive(at[3], at[3] + 25),
            Directive(at[4], at[4], grown),
            Directive(at[5], at[5] + 10, grown),
            Directive(at[6], at[6] + 20, stub),
            Directive(length - 5, length, stub),
        ],
        length,
    )
    assert check(source, edits.apply(source), 16) == edits


def test_new_tokens_at_the_end_are_one_edit() -> None:
    source = list(range(50))
    assert list(derive_edits(source, [*source, 7, 8])) == [Directive(50, 50, (7, 8))]
    assert list(derive_edits(source, [*source[:40], 7])) == [Directive(40, 50, (7,))]
    assert derive_edits(source, source).is_empty
    assert list(derive_edits(source, [])) == [Directive(0, 50)]
    assert list(derive_edits([], source)) == [Directive(0, 0, tuple(source))]


def test_prefix_may_be_short_and_suffix_may_not() -> None:
    source = [1, 2, 3, *range(100, 120), 4, 5]
    target = [1, 2, 9, *range(200, 220), 4, 5]
    assert kept_runs(check(source, target, 3)) == [(0, 0, 2)]
    assert kept_runs(check(source, target, 2)) == [(0, 0, 2), (23, 23, 2)]


def test_a_command_run_again_costs_only_its_own_output() -> None:
    """The old output is a stub, the same output is new at the end: what is between stays."""
    rng = np.random.default_rng(5)
    system, output = rng.integers(0, 900, (2, 300)).tolist()
    script = rng.integers(0, 900, 150).tolist()
    between = [*script, *rng.integers(0, 900, 20).tolist(), *script]  # repeats itself
    stub = list(range(2000, 2010))
    source = system + output + between
    target = system + stub + between + output
    assert kept_runs(check(source, target, 16)) == [(0, 0, 300), (600, 310, 320)]


def test_settings_are_passed_on_and_checked() -> None:
    (edit,) = derive_edits([1, 2], [1, 3], mode=Mode.REPAIR, repair=4)
    assert edit == Directive(1, 2, (3,), Mode.REPAIR, 4)
    for keywords, field in (
        ({"min_keep": 0}, "min_keep"),
        ({"min_keep": 2.0}, "min_keep"),
        ({"mode": "drop"}, "mode"),
        ({"repair": 3}, "repair"),
    ):
        with pytest.raises(DirectiveError) as caught:
            derive_edits([1], [2], **keywords)  # type: ignore[arg-type]
        assert caught.value.field == field
    for source, target, field in (([-1], [1], "source[0]"), ([1], ["a"], "target[0]")):
        with pytest.raises(DirectiveError) as caught:
            derive_edits(source, target)  # type: ignore[arg-type]
        assert caught.value.field == field


# --- the benchmark's inputs, at a small size ----------------------------------------------------


def test_benchmark_inputs_are_right_and_near_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work, in grams looked at, stays within its bound for hostile inputs too."""
    looked_at = 0
    pairs = diff._pairs

    def counting(*args: object) -> tuple[np.ndarray, np.ndarray, int]:
        nonlocal looked_at
        result = pairs(*args)  # type: ignore[arg-type]
        looked_at += result[2]
        return result

    monkeypatch.setattr(diff, "_pairs", counting)
    rng = np.random.default_rng(0)
    size = 40_000
    for _, source, target, attainable in bench._realistic(rng, size):
        looked_at = 0
        edits = check(source, target, 16)
        assert attainable is not None and kept_tokens(edits) >= attainable
        assert looked_at <= 0.5 * (len(source) + len(target))
    for _, source, target in bench._hostile(rng, size):
        looked_at = 0
        check(source, target, 16)
        assert looked_at <= (diff.MAX_WORK + 1) * (len(source) + len(target))

"""From episodes to numbers: a line for each arm, and arms beside each other on the same tasks and
seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from leyline.evals.arms import ARMS, PAIRS, Arm
from leyline.evals.stats import mcnemar, paired_interval, wilson
from leyline.evals.store import Episode

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One arm over all its finished episodes. rate: solved of episodes, with its 95 % interval.
    Tokens and seconds are sums; cached and computed are None where the server doesn't count."""

    arm: Arm
    episodes: int
    solved: int
    rate: float | None
    interval: Interval | None
    reasons: dict[str, int]
    turns: int
    prompt: int
    cached: int | None
    computed: int | None
    completion: int
    moved: int
    edits: int
    fallbacks: dict[str, int]
    model_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm beside another, over the tasks and seeds that both finished.

    both, only_arm, only_beside, neither: pairs by who solved them. difference: of the rates, with
    its 95 % interval; p: McNemar's. computed, model_s: of this arm as a share of the other's, and
    for each turn, as one arm may need more of them.
    """

    arm: Arm
    beside: Arm
    pairs: int
    both: int
    only_arm: int
    only_beside: int
    neither: int
    difference: float | None
    interval: Interval | None
    p: float
    computed: float | None
    computed_each_turn: float | None
    model_s: float | None
    model_s_each_turn: float | None


def lines_of(episodes: Sequence[Episode]) -> list[Line]:
    """A line for each arm that has an episode, in the order of ARMS."""
    by_arm = {arm: [each for each in episodes if each.arm == arm] for arm in ARMS}
    return [_line(arm, found) for arm, found in by_arm.items() if found]


def comparisons_of(episodes: Sequence[Episode]) -> list[Comparison]:
    """All of PAIRS whose arms have a task and seed in common."""
    found = []
    for arm, beside in PAIRS:
        pairs = _pairs(episodes, arm, beside)
        if pairs:
            found.append(_compare(arm, beside, pairs))
    return found


def by_task(episodes: Sequence[Episode]) -> dict[str, dict[Arm, tuple[int, int]]]:
    """For each task and arm: solved, and how many episodes."""
    table: dict[str, dict[Arm, tuple[int, int]]] = {}
    for each in sorted(episodes, key=lambda episode: episode.task):
        row = table.setdefault(each.task, {})
        solved, n = row.get(each.arm, (0, 0))
        row[each.arm] = (solved + each.solved, n + 1)
    return table


def _line(arm: Arm, episodes: Sequence[Episode]) -> Line:
    n, solved = len(episodes), sum(each.solved for each in episodes)
    called = [each for each in episodes if each.turns]  # without a call there is nothing to count
    fallbacks: Counter[str] = Counter()
    for each in episodes:
        fallbacks.update(each.fallbacks)
    return Line(
        arm=arm,
        episodes=n,
        solved=solved,
        rate=solved / n if n else None,
        interval=wilson(solved, n),
        reasons=dict(Counter(_kind(each.reason) for each in episodes).most_common()),
        turns=sum(each.turns for each in episodes),
        prompt=sum(each.prompt for each in episodes),
        cached=_sum([each.cached for each in called]),
        computed=_sum([each.computed for each in called]),
        completion=sum(each.completion for each in episodes),
        moved=sum(each.moved for each in episodes),
        edits=sum(each.edits for each in episodes),
        fallbacks=dict(fallbacks),
        model_s=sum(each.model_s for each in episodes),
        wall_s=sum(each.wall_s for each in episodes),
    )


def _pairs(episodes: Sequence[Episode], arm: Arm, beside: Arm) -> list[tuple[Episode, Episode]]:
    others = {(each.task, each.seed): each for each in episodes if each.arm == beside}
    mine = [each for each in episodes if each.arm == arm and (each.task, each.seed) in others]
    return [(each, others[each.task, each.seed]) for each in mine]


def _compare(arm: Arm, beside: Arm, pairs: Sequence[tuple[Episode, Episode]]) -> Comparison:
    kinds = Counter((mine.solved, other.solved) for mine, other in pairs)
    only_arm, only_beside = kinds[True, False], kinds[False, True]
    differences: dict[str, list[int]] = {}
    for mine, other in pairs:
        differences.setdefault(mine.task, []).append(int(mine.solved) - int(other.solved))
    ours, theirs = lines_of([mine for mine, _ in pairs]), lines_of([other for _, other in pairs])
    (line,), (line_beside,) = ours, theirs
    turns = _ratio(line.turns, line_beside.turns)
    computed = _ratio(line.computed, line_beside.computed)
    model_s = _ratio(line.model_s, line_beside.model_s)
    return Comparison(
        arm=arm,
        beside=beside,
        pairs=len(pairs),
        both=kinds[True, True],
        only_arm=only_arm,
        only_beside=only_beside,
        neither=kinds[False, False],
        difference=(only_arm - only_beside) / len(pairs),
        interval=paired_interval(differences),
        p=mcnemar(only_arm, only_beside),
        computed=computed,
        computed_each_turn=_ratio(computed, turns),
        model_s=model_s,
        model_s_each_turn=_ratio(model_s, turns),
    )


def _kind(reason: str) -> str:
    """A reason without its particulars."""
    return reason.partition(":")[0]


def _sum(counts: Sequence[int | None]) -> int | None:
    return None if None in counts else sum(count or 0 for count in counts)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None

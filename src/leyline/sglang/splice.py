"""Rows of a session's source enter a request: moved if nobody else needs them, else copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend, alloc_token_slots
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo
from torch import Tensor

from leyline.channel import Fallback
from leyline.plan import Keep
from leyline.sglang.sessions import User
from leyline.sglang.turn import Turn

if TYPE_CHECKING:
    from leyline.sglang.cache import LeylineRadixCache


@dataclass(frozen=True, slots=True)
class Path:
    """A key's cached rows: their slots `[n]` on the device, and the tree node where they end."""

    node: int
    slots: Tensor


def splice(
    cache: LeylineRadixCache, turn: Turn, run: tuple[Keep, ...], after: Tensor
) -> Tensor | Fallback:
    """Slots with the rows of `run`, turned to their new positions; they belong to the caller.

    after: slots of all rows before them, int64. A Fallback, and nothing changed, if that can't be.
    """
    at, n = run[0].dst, sum(keep.n for keep in run)
    last = len(run) == len(turn.to_come)
    if last:
        release_source(cache, turn)
    source = find_source(cache, turn)
    if len(source.slots) < max(keep.src + keep.n for keep in run):
        return Fallback.SOURCE_PARTLY_EVICTED if len(source.slots) else Fallback.SOURCE_MISSING
    if last and cache.page_size == 1:
        taken = _take(cache, turn, source, run)
        if taken is not None:
            turn.moved_away = True
            cache.rows.turn(taken, _shifts(run))
            return taken
    slots = _copy(cache, source, run, after, at, n)
    if slots is None:
        return Fallback.NO_ROOM
    turn.report = replace(turn.report, copied=True)
    cache.users.own(slots, turn.number)
    if last and _drop(cache, _tail(cache, turn)):
        turn.moved_away = True
    return slots


def find_source(cache: LeylineRadixCache, turn: Turn) -> Path:
    """What is cached of the turn's source."""
    assert turn.source is not None
    match = cache.find(turn.source.key)
    slots = cache.path_device_indices(match.last_device_node)
    return Path(match.last_device_node, slots[: match.device_prefix_len])


def lock_source(cache: LeylineRadixCache, turn: Turn) -> None:
    """Keep the source from being evicted."""
    if turn.lock is None and turn.to_come:
        turn.lock = cache.lock(find_source(cache, turn).node)


def release_source(cache: LeylineRadixCache, turn: Turn) -> None:
    cache.unlock(turn.lock)
    turn.lock = None


def forget(
    cache: LeylineRadixCache, user: User, number: int, shared: int = 0
) -> tuple[list[Tensor], int]:
    """Drop every row that only this session used, in all its branches (I5): their slots, and how
    many rows of the branches stay for others. shared: rows that its request uses now, not
    counted."""
    freed: list[Tensor] = []
    kept: dict[int, int] = {}
    for leaf in cache.sessions.forget(user):
        path = _path(cache, leaf)
        chain = _droppable(cache, path, number)
        for each in path:
            kept[each.node_id] = each.path_end - max(each.path_start, shared)
        for each in chain:
            del kept[each.node_id]
        freed += [_slots(cache, each) for each in chain]
        _drop(cache, chain)
    return freed, sum(n for n in kept.values() if n > 0)


def drop_branches(cache: LeylineRadixCache, number: int, leaves: Sequence[int]) -> None:
    """Free what only this session used in branches that it had to give up."""
    for leaf in leaves:
        _drop(cache, _droppable(cache, _path(cache, leaf), number))


# -- dropping and moving ----------------------------------------------------------------------


def _take(
    cache: LeylineRadixCache, turn: Turn, source: Path, run: tuple[Keep, ...]
) -> Tensor | None:
    """Slots of the run's rows, taken out of the tree with all behind them; None if others need any
    of these."""
    at, end = _common(cache, turn), len(source.slots)
    if any(keep.src < at for keep in run):
        return None
    chain = _tail(cache, turn)
    if not chain or chain[0].path_start != at or chain[-1].path_end != end:
        return None
    parts: list[Tensor] = []
    for each in reversed(chain):
        result = cache.tree_core.evict_device_leaf(each.node_id, cache.is_write_back)
        parts.append(torch.cat(result.device_frees.pop(ComponentType.FULL)))
        cache._apply_eviction_result(result)
    taken = torch.cat(parts[::-1]).to(torch.int64)
    left = torch.ones(len(taken), dtype=torch.bool)
    for keep in run:
        left[keep.src - at : keep.src - at + keep.n] = False
    cache.token_to_kv_pool_allocator.free(taken[left.to(taken.device)])
    return torch.cat([taken[keep.src - at : keep.src - at + keep.n] for keep in run])


def _drop(cache: LeylineRadixCache, chain: list[TreePathNodeInfo]) -> bool:
    """Free these nodes' rows; whether there were any."""
    for each in reversed(chain):
        cache._apply_eviction_result(
            cache.tree_core.evict_device_leaf(each.node_id, cache.is_write_back)
        )
    return bool(chain)


def _tail(cache: LeylineRadixCache, turn: Turn) -> list[TreePathNodeInfo]:
    """The source's nodes behind what it has in common with the request, as far as droppable."""
    assert turn.source is not None
    at = _common(cache, turn)
    cache.find(turn.source.key[:at])  # a node ends here now
    node = cache.find(turn.source.key).last_device_node
    path = cache.tree_core.collect_path_info([node])[0]
    return _droppable(cache, [each for each in path if each.path_start >= at], turn.number)


def _path(cache: LeylineRadixCache, node: int) -> list[TreePathNodeInfo]:
    """The nodes down to this one; none if it was evicted."""
    try:
        return cache.tree_core.collect_path_info([node])[0]
    except KeyError:
        return []


def _droppable(
    cache: LeylineRadixCache, path: Sequence[TreePathNodeInfo], user: int
) -> list[TreePathNodeInfo]:
    """The nodes of the path that, from its end on, are childless, resident, unlocked and used by
    `user` alone."""
    if not path:
        return []
    unlocked_from = path[-1].path_end - _unlocked(cache, path[-1].node_id)
    chain: list[TreePathNodeInfo] = []
    for each in reversed(path):
        if (
            each.path_start < unlocked_from
            or each.num_children != len(chain[:1])
            or each.full_value_len != each.path_end - each.path_start
            or not cache.users.alone(_slots(cache, each), user)
        ):
            break
        chain.append(each)
    return chain[::-1]


def _slots(cache: LeylineRadixCache, node: TreePathNodeInfo) -> Tensor:
    return cache.tree_core.collect_full_device_indices(node.node_id, node.parent_id)


def _unlocked(cache: LeylineRadixCache, node: int) -> int:
    """Tokens at the end of a path that nobody has locked: those that a lock would protect."""
    before = cache.evictable_size()
    lock = cache.lock(node)
    after = cache.evictable_size()
    cache.unlock(lock)
    return before - after


def _common(cache: LeylineRadixCache, turn: Turn) -> int:
    """Up to where the source's key and the request's own are the same, in whole pages."""
    assert turn.source is not None
    shared = turn.reuse.shared
    if turn.reuse.from_source:
        return shared
    key, tokens = turn.source.key[:shared], turn.source.tokens[:shared]
    marked = (key != tokens).nonzero()[0]
    edit = turn.edits[0].start if turn.edits else len(tokens)
    same = min(shared, edit, int(marked[0]) if len(marked) else shared)
    return same // cache.page_size * cache.page_size


# -- copying ----------------------------------------------------------------------------------


def _copy(
    cache: LeylineRadixCache, source: Path, run: tuple[Keep, ...], after: Tensor, at: int, n: int
) -> Tensor | None:
    lock = cache.lock(source.node)  # allocating evicts
    try:
        slots = _alloc(cache, at, n, after)
        if slots is not None:
            rows = torch.cat([source.slots[keep.src : keep.src + keep.n] for keep in run])
            cache.rows.copy(rows, slots, _shifts(run))
        return slots
    finally:
        cache.unlock(lock)


def _alloc(cache: LeylineRadixCache, at: int, n: int, after: Tensor) -> Tensor | None:
    """`n` slots for positions from `at` on, behind those of the rows before; None if there is no
    room."""
    allocator = cache.token_to_kv_pool_allocator
    page = allocator.page_size
    need = n if page == 1 else n + page
    evict_from_tree_cache(cache, need)
    if allocator.available_size() < need:
        return None
    if page == 1:
        return alloc_token_slots(cache, n).to(torch.int64)
    start, end = torch.tensor([at]), torch.tensor([at + n])
    last = after[at - 1 : at].to(torch.int64) if at else torch.tensor([-1], device=cache.device)
    device = allocator.device
    return alloc_paged_token_slots_extend(
        cache, start.to(device), start, end.to(device), end, last, n
    ).to(torch.int64)


def _shifts(run: tuple[Keep, ...]) -> Tensor:
    """One shift a row, int64 on the CPU."""
    return torch.cat([torch.full((keep.n,), keep.shift, dtype=torch.int64) for keep in run])

"""A request's plan, made and executed: share the prefix, move or copy and rotate the kept rows,
make room for the rest."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from leyline.channel import Channel, EditReport, EngineError, Fallback, Report, check_strict
from leyline.directive import Edits
from leyline.engine.request import Request
from leyline.engine.slots import NO_SLOTS, Slots
from leyline.engine.store import Forgotten, Store
from leyline.engine.tree import PUBLIC, Match, Node, User, common_prefix
from leyline.lineage import Lineage, Span, mark_key
from leyline.outline import Outline, evicted_by, parts_of, redone_by
from leyline.plan import Keep, Plan
from leyline.reuse import Reuse, edit_reports, edits_of, provenance, reuse, share_only


@dataclass(frozen=True, slots=True)
class Compared:
    """A session's sequence, int64, as it was before the request; the first `held` tokens of it are
    still cached. edits: lead from it to the prompt."""

    tokens: np.ndarray
    held: int
    edits: Edits


@dataclass(frozen=True, slots=True)
class Intent:
    """What is to be done for a request; nothing has changed yet.

    reuse: its shared rows are those of `base`.
    source, source_key: the source's rows that are still cached, and their key.
    edits: all edits from the source on, also those with nothing kept behind them.
    compared: what they were derived from.
    """

    target: np.ndarray
    reuse: Reuse
    base: Match
    base_key: np.ndarray
    spans: tuple[Span, ...]
    source: Match | None = None
    source_key: np.ndarray = field(default_factory=lambda: NO_SLOTS)
    edits: tuple[EditReport, ...] = ()
    compared: Compared | None = None
    fresh: bool = False

    def instead(self, reason: Fallback) -> Intent:
        """The same, said to be less than was asked for."""
        return replace(self, reuse=replace(self.reuse, fallback=reason))


@dataclass(slots=True)
class Rows:
    """A request's rows after the splice.

    key, slots: int64, one a target token; rows of the positions in `todo` are not computed yet.
    node: locked; the first `locked` rows are the tree's, the others belong to the request.
    source_gone: rows were moved, the session's old sequence is no longer whole.
    """

    key: np.ndarray
    slots: Slots
    node: Node
    locked: int
    todo: np.ndarray
    spans: tuple[Span, ...]
    source_gone: bool
    report: Report


def intend(store: Store, request: Request, vocab_size: int, enabled: bool = True) -> Intent:
    """Plan a request. Changes nothing (but where nodes of the tree are cut).

    Raises DirectiveError for directives that don't fit the session's source, StrictFallback when
    the request is strict and can't be spliced as asked.
    """
    channel = request.channel
    if channel is None:
        assert request.prompt is not None
        return _share_only(store, request.prompt)
    lineage = store.lineages.get(channel.owner, channel.session) if enabled else None
    if lineage is None:
        intent = _without_source(store, request, enabled)
    else:
        intent = _from_source(store, request, channel, lineage, vocab_size)
    check_strict(channel, intent.reuse.fallback)
    return intent


def execute(store: Store, intent: Intent, channel: Channel | None) -> Rows | None:
    """Carry out an intent. None, and nothing changed, when there is no room for it now."""
    began = time.perf_counter()
    user = PUBLIC if channel is None else channel.user
    plan, base = intent.reuse.plan, intent.base
    slots = np.full(plan.target_length, -1, dtype=np.int64)
    slots[: base.n] = base.slots
    moved = intent.reuse.moved
    store.tree.lock(base.node)
    in_place = bool(moved) and _movable(store, intent, moved, user)
    if not _fits(store, intent, moved, in_place):
        store.tree.unlock(base.node)
        return None
    try:
        forgotten = _forget(store, intent, channel) if intent.fresh else None
        if in_place:
            _move(store, intent, moved, slots, user)
        elif moved:
            _copy(store, intent, moved, slots)
        _allocate(store, plan, slots)
    except BaseException:
        mine = slots[base.n :]
        store.pool.free(mine[mine >= 0])
        store.tree.unlock(base.node)
        raise
    store.tree.use(base.node, user)
    report = Report(
        prompt=plan.target_length,
        shared=base.n,
        moved=sum(keep.n for keep in moved),
        computed=plan.computed,
        session=None if channel is None else channel.session,
        edits=tuple(e for e in intent.edits if intent.fresh or _kept_behind(e, moved)),
        copied=bool(moved) and not in_place,
        fallback=intent.reuse.fallback,
        splice_ms=(time.perf_counter() - began) * 1e3,
        forgotten=forgotten.freed if forgotten else 0,
        kept_by_others=forgotten.kept_by_others if forgotten else 0,
        outline=None if channel is None else _outline(intent, copied=bool(moved) and not in_place),
    )
    return Rows(
        key=_key(store, intent, moved),
        slots=slots,
        node=base.node,
        locked=base.n,
        todo=np.flatnonzero(_computed(plan)),
        spans=intent.spans,
        source_gone=in_place,
        report=report,
    )


def resume(store: Store, tokens: np.ndarray, key: np.ndarray, spans: tuple[Span, ...]) -> Intent:
    """Take up a sequence that had to give way: what is still cached of it, the rest again."""
    base = store.tree.match(key[:-1])
    return replace(_share_only(store, tokens, base), base_key=key, spans=spans)


def without_splice(store: Store, intent: Intent, reason: Fallback) -> Intent:
    """The same request, prefilled behind its exact prefix."""
    exact = _share_only(store, intent.target)
    return replace(exact, edits=intent.edits, compared=intent.compared).instead(reason)


# -- planning ---------------------------------------------------------------------------------


def _share_only(store: Store, target: np.ndarray, base: Match | None = None) -> Intent:
    """Reuse `base`, by default the longest exact prefix; the last token is always computed."""
    base = base or store.tree.match(target[:-1])
    return Intent(
        target=target,
        reuse=share_only(len(target), base.n),
        base=base,
        base_key=target[: base.n],
        spans=(Span(0, len(target), True, 0),),
    )


def _without_source(store: Store, request: Request, enabled: bool) -> Intent:
    """A session with nothing cached: a first request, unless edits were asked for."""
    channel = request.channel
    assert channel is not None
    if request.prompt is None:
        raise EngineError(
            Fallback.SOURCE_MISSING,
            f"session {channel.session!r} has no cached sequence to edit: send its prompt first",
        )
    intent = replace(_share_only(store, request.prompt), fresh=enabled and channel.forgets)
    if not enabled:
        return intent.instead(Fallback.SWITCHED_OFF)
    asked = channel.directives is not None
    return intent.instead(Fallback.SOURCE_MISSING) if asked else intent


def _from_source(
    store: Store, request: Request, channel: Channel, lineage: Lineage, vocab_size: int
) -> Intent:
    target, edits = edits_of(channel, lineage.tokens, request.prompt, vocab_size)
    reports = edit_reports(channel, edits)
    exact = _share_only(store, target)
    source = store.tree.match(lineage.key)
    compared = Compared(lineage.tokens, source.n, edits)
    if channel.forgets:
        return replace(exact, edits=reports, compared=compared, fresh=True)
    chosen = reuse(edits, lineage, exact=exact.base.n, source=source.n)
    base, base_key = exact.base, exact.base_key
    if chosen.from_source:
        base_key = lineage.key[: chosen.shared]
        base = store.tree.match(base_key)
    return Intent(
        target=target,
        reuse=chosen,
        base=base,
        base_key=base_key,
        spans=provenance(chosen, lineage.spans),
        source=source,
        source_key=lineage.key[: source.n],
        edits=reports,
        compared=compared,
    )


def _outline(intent: Intent, copied: bool) -> Outline:
    """The prompt by the origin of its rows, for people."""
    plan, shared, seen = intent.reuse.plan, intent.base.n, intent.compared
    length = plan.target_length
    if seen is None:
        return Outline(intent.target, parts_of(plan, shared, copied), reprefill=length - shared)
    # Rows that a plain prefix cache would have: exact ones of anybody, or the session's last
    # sequence up to the first difference. The last token is always computed.
    prefix = min(common_prefix(seen.tokens, intent.target[:-1]), seen.held)
    exact = 0 if intent.reuse.from_source else shared
    redone = () if intent.fresh else redone_by(seen.edits)
    return Outline(
        intent.target,
        parts_of(plan, shared, copied, redone),
        evicted_by(seen.edits, seen.tokens, intent.fresh),
        source=len(seen.tokens),
        reprefill=length - max(exact, prefix),
    )


# -- execution --------------------------------------------------------------------------------


def _movable(store: Store, intent: Intent, moved: tuple[Keep, ...], user: User) -> bool:
    """Whether the source's rows behind the shared prefix are nobody else's."""
    assert intent.source is not None
    at = common_prefix(intent.source_key, intent.base_key)
    return all(k.src >= at for k in moved) and store.tree.can_take(intent.source.node, at, user)


def _fits(store: Store, intent: Intent, moved: tuple[Keep, ...], in_place: bool) -> bool:
    """Whether there is room, with the prefix locked. Rows taken along or copied from stop being
    room: a move takes its kept rows out of the tree, a copy has to keep the whole source."""
    n = sum(keep.n for keep in moved)
    if not moved or in_place:
        return intent.reuse.plan.computed + n <= store.room
    assert intent.source is not None
    store.tree.lock(intent.source.node)
    fits = intent.reuse.plan.computed + n <= store.room
    store.tree.unlock(intent.source.node)
    return fits


def _forget(store: Store, intent: Intent, channel: Channel | None) -> Forgotten:
    """Drop what the session's rows behind the exact prefix are, before anything is prefilled."""
    assert channel is not None
    store.lineages.drop(channel.owner, channel.session)
    forgotten = store.forget(channel.user, keep=intent.base_key)
    if channel.scrub:
        store.scrub()
    return forgotten


def _move(store: Store, intent: Intent, moved: tuple[Keep, ...], slots: Slots, user: User) -> None:
    """Take the source's rows out of the tree and turn them in place. No second copy is made."""
    at = common_prefix(intent.source_key, intent.base_key)
    taken = store.tree.take(intent.source_key, at, user)
    left = np.ones(len(taken), dtype=bool)
    for keep in moved:
        where = slice(keep.src - at, keep.src - at + keep.n)
        slots[keep.dst : keep.dst + keep.n] = taken[where]
        left[where] = False
    store.pool.free(taken[left])
    rows = np.concatenate([slots[k.dst : k.dst + k.n] for k in moved])
    store.planes.rotate(rows, _shifts(moved))


def _copy(store: Store, intent: Intent, moved: tuple[Keep, ...], slots: Slots) -> None:
    """Copy the source's rows, turned on the way; the source stays as it is."""
    source = intent.source
    assert source is not None
    store.tree.lock(source.node)  # allocating evicts
    try:
        base = intent.base
        n = sum(keep.n for keep in moved)
        copies = store.alloc(n, after=int(base.slots[-1]) if base.n else -1)
        assert copies is not None, "room was checked before"
        rest = copies
        for keep in moved:
            slots[keep.dst : keep.dst + keep.n], rest = rest[: keep.n], rest[keep.n :]
        rows = np.concatenate([source.slots[k.src : k.src + k.n] for k in moved])
        store.planes.copy(rows, copies, _shifts(moved))
    finally:
        store.tree.unlock(source.node)


def _allocate(store: Store, plan: Plan, slots: Slots) -> None:
    """Slots for the tokens to compute, behind their neighbours where there is room."""
    for compute in plan.computes:
        after = int(slots[compute.dst - 1]) if compute.dst else -1
        got = store.alloc(compute.n, after)
        assert got is not None, "room was checked before"
        slots[compute.dst : compute.dst + compute.n] = got


def _key(store: Store, intent: Intent, moved: tuple[Keep, ...]) -> np.ndarray:
    """The tree key of the target: a new mark at the first moved row keeps the branch apart."""
    key = intent.target.copy()
    if moved:
        key = mark_key(key, moved[0].dst, store.next_serial())
    key[: len(intent.base_key)] = intent.base_key
    return key


def _shifts(moved: tuple[Keep, ...]) -> np.ndarray:
    return np.concatenate([np.full(keep.n, keep.shift, dtype=np.int64) for keep in moved])


def _computed(plan: Plan) -> np.ndarray:
    mask = np.zeros(plan.target_length, dtype=bool)
    for compute in plan.computes:
        mask[compute.dst : compute.dst + compute.n] = True
    return mask


def _kept_behind(edit: EditReport, moved: tuple[Keep, ...]) -> bool:
    return any(keep.src >= edit.end for keep in moved)

"""A request's plan, made and executed: share the prefix, move or copy and rotate the kept rows,
make room for the rest."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from leyline.diff import derive_edits
from leyline.directive import Edits, Mode
from leyline.engine.request import (
    Channel,
    EditReport,
    EngineError,
    Fallback,
    Report,
    Request,
    StrictFallback,
)
from leyline.engine.slots import NO_SLOTS, Slots
from leyline.engine.store import Forgotten, Store
from leyline.engine.tree import PUBLIC, Match, Node, User, common_prefix
from leyline.lineage import Lineage, Span, mark_key, spans_after
from leyline.plan import Compute, Keep, Plan, Segment, make_plan


@dataclass(frozen=True, slots=True)
class Intent:
    """What is to be done for a request; nothing has changed yet.

    plan: its first Keep, if at row 0, is the rows of `base`; further ones are the source's.
    source, source_key: the source's rows that are still cached, and their key.
    edits: all edits from the source on, also those with nothing kept behind them.
    """

    target: np.ndarray
    plan: Plan
    base: Match
    base_key: np.ndarray
    spans: tuple[Span, ...]
    source: Match | None = None
    source_key: np.ndarray = field(default_factory=lambda: NO_SLOTS)
    edits: tuple[EditReport, ...] = ()
    fallback: Fallback | None = None
    fresh: bool = False


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
    check_strict(channel, intent.fallback)
    return intent


def execute(store: Store, intent: Intent, channel: Channel | None) -> Rows | None:
    """Carry out an intent. None, and nothing changed, when there is no room for it now."""
    began = time.perf_counter()
    user = PUBLIC if channel is None else channel.user
    plan, base = intent.plan, intent.base
    slots = np.full(plan.target_length, -1, dtype=np.int64)
    slots[: base.n] = base.slots
    moved = [keep for keep in plan.keeps if keep.dst >= base.n]
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
        fallback=intent.fallback,
        splice_ms=(time.perf_counter() - began) * 1e3,
        forgotten=forgotten.freed if forgotten else 0,
        kept_by_others=forgotten.kept_by_others if forgotten else 0,
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
    return replace(_share_only(store, intent.target), edits=intent.edits, fallback=reason)


# -- planning ---------------------------------------------------------------------------------


def _share_only(store: Store, target: np.ndarray, base: Match | None = None) -> Intent:
    """Reuse `base`, by default the longest exact prefix; the last token is always computed."""
    base = base or store.tree.match(target[:-1])
    segments: list[Segment] = [Keep(0, 0, base.n)] if base.n else []
    segments.append(Compute(base.n, len(target) - base.n))
    return Intent(
        target=target,
        plan=Plan(tuple(segments), len(target), len(target)),
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
        return replace(intent, fallback=Fallback.SWITCHED_OFF)
    asked = channel.directives is not None
    return replace(intent, fallback=Fallback.SOURCE_MISSING) if asked else intent


def _from_source(
    store: Store, request: Request, channel: Channel, lineage: Lineage, vocab_size: int
) -> Intent:
    target, edits = _edits(request, channel, lineage, vocab_size)
    reports = tuple(
        EditReport(
            e.start, e.end, len(e.replacement), e.shift, Mode.FORGET if channel.forgets else e.mode
        )
        for e in edits
        if e.start < len(lineage.tokens)
    )
    exact = _share_only(store, target)
    if channel.forgets:
        return replace(exact, edits=reports, fresh=True)
    source = store.tree.match(lineage.key)
    plan = make_plan(edits, available=source.n, exact=lineage.exact)
    whole = make_plan(edits, exact=lineage.exact)
    if exact.base.n >= plan.shared:
        base, base_key, from_source = exact.base, exact.base_key, False
    else:
        base = store.tree.match(lineage.key[: plan.shared])
        base_key, from_source = lineage.key[: plan.shared], True
    final = _behind(plan, base.n, from_source)
    fallback = None
    if final.computed > whole.computed:
        fallback = Fallback.SOURCE_PARTLY_EVICTED if source.n else Fallback.SOURCE_MISSING
    return Intent(
        target=target,
        plan=final,
        base=base,
        base_key=base_key,
        spans=_provenance(plan, final, lineage.spans, from_source),
        source=source,
        source_key=lineage.key[: source.n],
        edits=reports,
        fallback=fallback,
    )


def _edits(
    request: Request, channel: Channel, lineage: Lineage, vocab_size: int
) -> tuple[np.ndarray, Edits]:
    """The prompt, and the edits that lead to it from the session's source."""
    source = lineage.tokens
    mode = channel.mode
    if channel.directives is None:
        assert request.prompt is not None
        return request.prompt, derive_edits(
            source, request.prompt, mode=mode, repair=channel.repair
        )
    edits = Edits.of(channel.directives, len(source), vocab_size)
    edited = edits.apply(source)
    if request.prompt is None:
        if len(edited) == 0:
            raise EngineError("empty_prompt", "the directives leave nothing of the sequence")
        return edited, edits
    # What the directives leave open, new tokens above all, is derived as ever.
    rest = derive_edits(edited, request.prompt, mode=mode, repair=channel.repair)
    return request.prompt, edits.compose(rest)


def _behind(plan: Plan, n: int, from_source: bool) -> Plan:
    """`plan` with its first `n` rows taken from the tree as they are: the source's own rows, or
    exact ones."""
    segments: list[Segment] = [Keep(0, 0, n)] if n else []
    for s in plan.segments:
        cut = max(0, n - s.dst)
        if cut >= s.n:
            continue
        if isinstance(s, Keep):
            segments.append(Keep(s.src + cut, s.dst + cut, s.n - cut))
        else:
            segments.append(Compute(s.dst + cut, s.n - cut))
    moved = (s.dst for s in segments if isinstance(s, Keep) and s.dst >= n)
    first = next(moved, plan.target_length)
    return Plan(
        tuple(segments),
        plan.target_length,
        min(plan.amortized_from, first) if from_source else first,
    )


def _provenance(
    plan: Plan, final: Plan, spans: tuple[Span, ...], from_source: bool
) -> tuple[Span, ...]:
    """Where the target's rows come from."""
    derived = spans_after(plan, spans)
    if from_source:
        return derived
    n = final.amortized_from
    rest = [
        Span(max(s.start, n), s.start + s.n - max(s.start, n), False, s.rotations)
        for s in derived
        if s.start + s.n > n
    ]
    return (Span(0, n, True, 0), *rest) if n else tuple(rest)


def check_strict(channel: Channel, fallback: Fallback | None) -> None:
    if channel.strict and fallback is not None:
        raise StrictFallback(
            fallback,
            f"strict: the request could not be spliced ({fallback}) and was not run; "
            "leave strict out to have it prefilled",
        )


# -- execution --------------------------------------------------------------------------------


def _movable(store: Store, intent: Intent, moved: list[Keep], user: User) -> bool:
    """Whether the source's rows behind the shared prefix are nobody else's."""
    assert intent.source is not None
    at = common_prefix(intent.source_key, intent.base_key)
    return all(k.src >= at for k in moved) and store.tree.can_take(intent.source.node, at, user)


def _fits(store: Store, intent: Intent, moved: list[Keep], in_place: bool) -> bool:
    """Whether there is room, with the prefix locked. Rows taken along or copied from stop being
    room: a move takes its kept rows out of the tree, a copy has to keep the whole source."""
    n = sum(keep.n for keep in moved)
    if not moved or in_place:
        return intent.plan.computed + n <= store.room
    assert intent.source is not None
    store.tree.lock(intent.source.node)
    fits = intent.plan.computed + n <= store.room
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


def _move(store: Store, intent: Intent, moved: list[Keep], slots: Slots, user: User) -> None:
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


def _copy(store: Store, intent: Intent, moved: list[Keep], slots: Slots) -> None:
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


def _key(store: Store, intent: Intent, moved: list[Keep]) -> np.ndarray:
    """The tree key of the target: a new mark at the first moved row keeps the branch apart."""
    key = intent.target.copy()
    if moved:
        key = mark_key(key, moved[0].dst, store.next_serial())
    key[: len(intent.base_key)] = intent.base_key
    return key


def _shifts(moved: list[Keep]) -> np.ndarray:
    return np.concatenate([np.full(keep.n, keep.shift, dtype=np.int64) for keep in moved])


def _computed(plan: Plan) -> np.ndarray:
    mask = np.zeros(plan.target_length, dtype=bool)
    for compute in plan.computes:
        mask[compute.dst : compute.dst + compute.n] = True
    return mask


def _kept_behind(edit: EditReport, moved: list[Keep]) -> bool:
    return any(keep.src >= edit.end for keep in moved)

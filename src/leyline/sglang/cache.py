"""SGLang's radix cache with sessions: where a request's rows are found, and under which key.

Kept rows enter a request at one of two points of SGLang's own path. A run that begins right behind
the shared rows comes as a "host hit": promised by `match_prefix`, put in place by `init_load_back`.
A run behind a replacement comes when the prefill chunk that ends there (admission.py) is
checkpointed. Either way the rows are the request's own until the tree takes them.

Amortized rows are filed under a key with a mark at the first of them, so no other request walks
into them (I8); requests without a session are untouched (I1).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from torch import Tensor

from leyline.channel import Fallback, StrictFallback, check_strict
from leyline.directive import DirectiveError
from leyline.lineage import Lineage
from leyline.plan import Keep
from leyline.reuse import edit_reports
from leyline.sglang import splice
from leyline.sglang.arrival import asked_of, number_of, refuse, turn_of
from leyline.sglang.report import Metrics, publish
from leyline.sglang.rows import Rows
from leyline.sglang.sessions import Sessions, User, Users
from leyline.sglang.turn import Turn


class LeylineRadixCache(UnifiedRadixCache):
    """Made by SGLang's `create_unified_radix_cache`; `attach` completes it."""

    sessions: Sessions
    users: Users
    rows: Rows
    metrics: Metrics
    vocab_size: int

    _keyed: Turn | None = None
    """Whose key the insertions of the moment are filed under."""
    _namespace: tuple[str | None, str | None] = (None, None)
    """`extra_key` and `cache_salt` of the request that is being served."""
    _loaded_privately = False
    """Whether the last load-back was a splice."""

    def attach(self, rows: Rows, metrics: Metrics, vocab_size: int) -> None:
        self.sessions = Sessions()
        slots = self.token_to_kv_pool_allocator.size + self.page_size
        self.users = Users(slots, self.token_to_kv_pool_allocator.device)
        self.rows = rows
        self.metrics = metrics
        self.vocab_size = vocab_size

    def reset(self) -> None:
        super().reset()
        if hasattr(self, "sessions"):  # SGLang's own __init__ resets too
            self.sessions.clear()

    # -- matching -----------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        turn = turn_of(params.req)
        if turn is None or self.disable:
            return super().match_prefix(params)
        with self._serving(params.req):
            try:
                return self._plan(turn, params)
            except (DirectiveError, StrictFallback) as error:
                refuse(params.req, error)
                return self.find(array("q"))

    def has_source(self, req: Any, turn: Turn, at: int) -> bool:
        """Whether the rows of the run at target position `at` are all still cached."""
        with self._serving(req):
            found = splice.find_source(self, turn)
        return len(found.slots) >= max(keep.src + keep.n for keep in turn.run_at(at))

    def cached_of(self, lineage: Lineage, extra_key: str | None, cache_salt: str | None) -> int:
        """How many of its rows are there now."""
        with self._in_namespace(extra_key, cache_salt):
            return int(self.find(lineage.key).device_prefix_len)

    def find(self, key: np.ndarray | array[int]) -> MatchResult:
        """The rows cached for a key in the namespace of the request being served."""
        tokens = key if isinstance(key, array) else array("q", np.ascontiguousarray(key).tobytes())
        extra_key, salt = self._namespace
        return self._match_tree(MatchPrefixParams(key=RadixKey(tokens, extra_key, cache_salt=salt)))

    def _plan(self, turn: Turn, params: MatchPrefixParams) -> MatchResult:
        tokens: array[int] = params.key.token_ids
        limit = min(len(params.key), len(tokens) - 1)
        if turn.spliced:
            turn.resumed, turn.promised = True, 0
            return self.find(turn.key(tokens)[:limit])
        exact = self.find(tokens[:limit])
        lineage = self.sessions.lineages.get(*turn.channel.user)
        if lineage is None or turn.channel.forgets:
            turn.plan_without_source(len(tokens), exact.device_prefix_len)
            if lineage is not None:
                turn.edits = edit_reports(
                    turn.channel, turn.derive(lineage, np.array(tokens), self.vocab_size)
                )
            check_strict(turn.channel, turn.reuse.fallback)
            return exact
        edits = turn.derive(lineage, np.array(tokens), self.vocab_size)
        source = self.find(lineage.key).device_prefix_len
        page = self.page_size
        held = len(lineage.key) // page * page
        turn.plan_from(
            lineage, held, edits, exact=exact.device_prefix_len, source=source, page=page
        )
        check_strict(turn.channel, turn.reuse.fallback)
        match = self.find(lineage.key[: turn.reuse.shared]) if turn.reuse.from_source else exact
        return match._replace(host_hit_length=turn.promised)

    # -- kept rows right behind the shared ones -----------------------------------------------

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any] | None:
        req = params.req
        turn = turn_of(req)
        self._loaded_privately = False
        if req is None or turn is None or not turn.promised:
            return super().init_load_back(params)
        run = turn.run_at(req.prefix_len)
        with self._serving(req):
            slots = self._enter(turn, run, self.path_device_indices(req.last_node))
        if slots is None:
            return 0, req.last_node
        turn.private = slots
        self._loaded_privately = True
        return len(slots), req.last_node

    def load_back_is_cache_owned(self) -> bool:
        return not self._loaded_privately and super().load_back_is_cache_owned()

    def prefix_device_indices(self, req: Any) -> Tensor:
        path = self.tree_core.collect_full_device_indices(
            req.last_node, self.root_node_handle(req.extra_key)
        )
        turn = turn_of(req)
        if self.sessions:
            self.users.use(path[: req.prefix_len], number_of(req))
        if turn is not None and turn.private is not None:
            path = torch.cat([path, turn.private])
            turn.private = None  # from here on they are in the request's row
        assert len(path) >= req.prefix_len, (req.rid, len(path), req.prefix_len)
        return path[: req.prefix_len]

    # -- kept rows behind a replacement -------------------------------------------------------

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint(req, up_to=up_to, **kwargs)
        turn = turn_of(req)
        if turn is None or req.finished() or not req.kv.holds_kv or up_to != req.extend_end:
            return
        run = turn.run_at(up_to)
        if not run:
            return
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        with self._serving(req):
            slots = self._enter(turn, run, row[:up_to].to(torch.int64))
        publish(req, turn)
        if slots is None:
            return
        end = up_to + len(slots)
        self.req_to_token_pool.write((req.kv.req_pool_idx, slice(up_to, end)), slots.to(row.dtype))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = end
        super().checkpoint(req, up_to=end, **kwargs)

    def _enter(self, turn: Turn, run: tuple[Keep, ...], after: Tensor) -> Tensor | None:
        """Slots of a run's rows, now the request's; None if they have to be computed."""
        began = time.perf_counter()
        slots = splice.splice(self, turn, run, after)
        if isinstance(slots, Fallback):
            turn.skip(run, slots)
        else:
            turn.entered(run, self.sessions.next_serial())
        if not turn.to_come:
            splice.release_source(self, turn)
        turn.took(time.perf_counter() - began)
        return None if isinstance(slots, Fallback) else slots

    # -- keys ---------------------------------------------------------------------------------

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        turn = turn_of(req)
        if not self.sessions:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            return
        start = req.kv.cache_protected_len
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        before = row[start:up_to].clone()
        self._keyed = turn
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        finally:
            self._keyed = None
        end = req.kv.cache_protected_len
        self.users.inserted(row[start:end].long(), before[: end - start].long(), number_of(req))

    def insert(self, params: InsertParams) -> InsertResult:
        key = params.key
        if self._keyed is not None and key is not None:
            marked = self._keyed.key(key.raw_token_ids())
            params.key = RadixKey(
                marked, key.extra_key, is_bigram=key.is_bigram, cache_salt=key.cache_salt
            )
        return super().insert(params)

    # -- begin and end ------------------------------------------------------------------------

    def begin(self, req: Any) -> None:
        """A request was admitted."""
        turn = asked_of(req)
        if turn is None:
            return
        self.sessions.began(turn)
        if turn.unsupported is not None:
            turn.plan_unsupported(len(req.origin_input_ids), req.prefix_len)
        with self._serving(req):
            if turn.channel.forgets and not turn.begun:
                self._forget(turn)
            splice.lock_source(self, turn)
        turn.begun = True
        # Rows spliced in are cached on the device, not on the host.
        req.host_hit_length = req.host_loaded_length = 0
        publish(req, turn)

    def _forget(self, turn: Turn) -> None:
        shared, scrub = turn.reuse.shared, turn.channel.scrub
        turn.forgot(*self._drop(turn.channel.user, turn.number, shared, scrub, but=turn))

    def drop_session(self, user: User, scrub: bool) -> tuple[int, int]:
        """Free what only this session uses; rows freed, and rows that stay, as others or its own
        requests that still run use them. What these leave goes when they end."""
        return self._drop(user, self.sessions.number(user), 0, scrub)

    def _drop(
        self, user: User, number: int, shared: int, scrub: bool, but: Turn | None = None
    ) -> tuple[int, int]:
        freed, kept = splice.forget(self, user, number, shared)
        for other in self.sessions.running(user):
            if other is not but:
                other.doomed, other.scrub = True, other.scrub or scrub
        if scrub:
            self.rows.zero(torch.cat([*freed, self._free_slots()]))
        return sum(map(len, freed)), kept

    def _free_slots(self) -> Tensor:
        allocator = self.token_to_kv_pool_allocator
        pages = allocator.get_all_free_pages()
        within = torch.arange(self.page_size, device=pages.device)
        return (pages[:, None] * self.page_size + within).flatten()

    def claim_kv_row(self, req: Any) -> bool:
        # Rows that were moved are the session's only copy: whatever ends the request, the tree
        # takes them.
        turn = turn_of(req)
        if turn is not None and turn.moved_away and not req.skip_radix_cache_insert:
            last = turn.spliced[-1]
            end = last.dst + last.n
            if req.kv.cache_protected_len < end <= req.kv.kv_committed_len:
                self.checkpoint_into_tree(req, up_to=end)
        return super().claim_kv_row(req)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        turn = asked_of(req)
        if turn is None:
            super().on_release(req, checkpointed=checkpointed)
            return
        self.sessions.ended(turn)
        with self._serving(req):
            splice.release_source(self, turn)
            source = self._source_of(turn) if turn.doomed else []
        leaf = req.last_node
        if not turn.doomed:
            self.sessions.add_leaf(turn.channel.user, leaf)
            if turn.unsupported is None and (checkpointed or turn.moved_away):
                self.sessions.remember(self._lineage(req, turn, checkpointed))
        if req.finished():
            self.metrics.count(turn.report)
        else:
            turn.give_way(req.cached_tokens)
        super().on_release(req, checkpointed=checkpointed)
        self._drop_gone()
        if turn.doomed:
            splice.drop_branches(self, turn.number, [leaf, *source])
            if turn.scrub:
                self.rows.zero(self._free_slots())

    def _source_of(self, turn: Turn) -> list[int]:
        """Where what is left of the source ends: this request had kept it from being dropped."""
        source = None if turn.source is None else splice.find_source(self, turn)
        return [source.node] if source is not None and len(source.slots) else []

    def _drop_gone(self) -> None:
        gone, self.sessions.gone = self.sessions.gone, []
        for number, leaves in gone:
            splice.drop_branches(self, number, leaves)

    def _lineage(self, req: Any, turn: Turn, whole: bool) -> Lineage:
        length = req.owned_kv_len() if whole else req.kv.cache_protected_len
        if turn.ahead:
            # SGLang samples a token all the same. It is nobody's answer.
            length = min(length, len(req.origin_input_ids))
        tokens = np.array(req.full_untruncated_fill_ids[:length], dtype=np.int64)
        return turn.lineage(tokens, self.sessions.lineages.get(*turn.channel.user))

    def _serving(self, req: Any) -> AbstractContextManager[None]:
        return self._in_namespace(req.extra_key, req.cache_salt)

    @contextmanager
    def _in_namespace(self, extra_key: str | None, cache_salt: str | None) -> Iterator[None]:
        self._namespace = (extra_key, cache_salt)
        try:
            yield
        finally:
            self._namespace = (None, None)

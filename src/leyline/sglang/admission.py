"""Prefill admission: a chunk ends where kept rows begin, so that they can enter before the next.

SGLang prefills what lies between two runs of kept rows as one chunk of a chunked request. It
tracks one unfinished chunked request at a time; while there is one, others that would be cut wait
for the next pass.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, _PrefillAdmission

from leyline.sglang.arrival import turn_of
from leyline.sglang.cache import LeylineRadixCache

_MADE: dict[type[PrefillAdder], type[PrefillAdder]] = {}


def adder_class(base: type[PrefillAdder], scheduler: Any) -> type[PrefillAdder] | None:
    """After `Scheduler.get_prefill_adder_class`: the same with `SpliceAdmission` on top."""
    if not isinstance(scheduler.tree_cache, LeylineRadixCache):
        return None
    if base not in _MADE:
        _MADE[base] = type(f"Leyline{base.__name__}", (SpliceAdmission, base), {})
    return _MADE[base]


class SpliceAdmission(PrefillAdder):
    """Mixed into SGLang's adder."""

    tree_cache: LeylineRadixCache
    chunked_req_limit: int | None
    rem_chunk_tokens: int | None

    def _select_prefill_admission(
        self, req: Any, **kwargs: Any
    ) -> _PrefillAdmission | AddReqResult:
        admission = super()._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        cut = self._cut(req, admission.prefix_len, admission.prefix_len + admission.extend_len)
        busy = kwargs.get("has_chunked_req", False) or self.new_chunked_req is not None
        if busy and (admission.is_chunked or cut is not None):
            return AddReqResult.OTHER
        if cut is None:
            return admission
        return _PrefillAdmission(
            prefix_len=admission.prefix_len,
            extend_len=cut - admission.prefix_len,
            max_new_tokens=0,
            is_chunked=True,
            replay_len=admission.replay_len,
        )

    def _commit_prefill_admission(self, req: Any, *args: Any, **kwargs: Any) -> None:
        super()._commit_prefill_admission(req, *args, **kwargs)
        self.tree_cache.begin(req)
        self._reserve_rest(req)

    def add_chunked_req(self, req: Any) -> Any:
        end = len(req.full_untruncated_fill_ids)
        cut = self._cut(req, req.prefix_len, end)
        if cut is not None:
            room = cut - req.prefix_len
            limit = self.chunked_req_limit
            self.chunked_req_limit = room if limit is None else min(room, limit)
        try:
            return self._add_chunked_req(req, end)
        finally:
            self._reserve_rest(req)

    def _add_chunked_req(self, req: Any, end: int) -> Any:
        if self.rem_chunk_tokens is not None:
            return super().add_chunked_req(req)
        # Without chunked prefill SGLang knows no chunk to go on with: give it one without a bound.
        self.rem_chunk_tokens = max(1, self.rem_input_tokens, end - req.prefix_len)
        try:
            return super().add_chunked_req(req)
        finally:
            self.rem_chunk_tokens = None

    def _reserve_rest(self, req: Any) -> None:
        """A chunk that was cut leaves room in its pass for others. They must leave the slots that
        the rest of the prompt takes, whether its rows enter or have to be computed."""
        if turn_of(req) is None:
            return
        rest = len(req.full_untruncated_fill_ids) - req.extend_end
        if rest > 0:
            self.memory_budget.reserve(rest, 0)

    def _cut(self, req: Any, start: int, end: int) -> int | None:
        """Where in `(start, end)` kept rows begin, if they can still be had."""
        turn = turn_of(req)
        at = None if turn is None else turn.next_run(start)
        if turn is None or at is None or at >= end:
            return None
        return at if self.tree_cache.has_source(req, turn, at) else self._cut(req, at, end)

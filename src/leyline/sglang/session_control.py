"""What a scheduler is asked about its sessions beside requests: to show one, to drop one.

SGLang has one pair of control messages that carries a method's name and free fields and brings
fields back: those of its tensor dumper. They reach every rank of every scheduler, all of whose
answers come back; with another method's name, SGLang never sees them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from leyline.sglang.arrival import asked_of
from leyline.sglang.sessions import User, owner_of

METHOD = "leyline.session"


@dataclass(frozen=True, slots=True)
class Question:
    """drop: end what runs for the session and free its rows, with `scrub` zero them; else show
    what is held."""

    session: str
    extra_key: str | None = None
    cache_salt: str | None = None
    drop: bool = False
    scrub: bool = False

    @property
    def user(self) -> User:
        return owner_of(self.extra_key, self.cache_salt), self.session


Answer = dict[str, Any]
"""Shown: the fields of a SessionAnswer but its name. Dropped: freed, kept_by_others."""


async def ask(manager: Any, question: Question) -> list[Answer]:
    """In the HTTP process: the answers of all schedulers that know the session."""
    from sglang.srt.managers.io_struct import DumperControlReqInput

    message = DumperControlReqInput(method=METHOD, body=asdict(question))
    # Whoever gave up waiting would leave his answer to the next one who asks.
    replies = await asyncio.shield(asyncio.ensure_future(manager.dumper_control(message)))
    failed = next((each.error for each in replies if not each.success), None)
    if failed is not None:
        raise RuntimeError(f"a scheduler did not answer about a session: {failed}")
    return [answer for each in replies for answer in each.response]


def on_control(original: Callable[..., Any], scheduler: Any, received: Any) -> Any:
    """AROUND `Scheduler.handle_dumper_control`, between two passes; returns what is sent back."""
    if received.method != METHOD:
        return original(scheduler, received)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    from leyline.sglang.cache import LeylineRadixCache

    try:
        question = Question(**received.body)
    except TypeError as error:
        return DumperControlReqOutput(success=False, response=[], error=str(error))
    found: Answer | None = None
    if isinstance(scheduler.tree_cache, LeylineRadixCache):
        found = _drop(scheduler, question) if question.drop else _show(scheduler, question)
    return DumperControlReqOutput(success=True, response=[] if found is None else [found])


def _show(scheduler: Any, question: Question) -> Answer | None:
    cache = scheduler.tree_cache
    lineage = cache.sessions.lineages.peek(*question.user)
    if lineage is None:
        return None
    return {
        "tokens": len(lineage.tokens),
        "cached": cache.cached_of(lineage, question.extra_key, question.cache_salt),
        "exact": lineage.exact,
        "edits": lineage.edits,
        "max_rotations": lineage.max_rotations,
        "age_s": round(time.monotonic() - lineage.created, 3),
        "segments": [
            {"start": s.start, "tokens": s.n, "exact": s.exact, "rotations": s.rotations}
            for s in lineage.spans
        ],
    }


def _drop(scheduler: Any, question: Question) -> Answer | None:
    cache, user = scheduler.tree_cache, question.user
    known = cache.sessions.holds(user)
    if not _end_requests(scheduler, user) and not known:
        return None
    freed, kept = cache.drop_session(user, question.scrub)
    return {"freed": freed, "kept_by_others": kept}


def _end_requests(scheduler: Any, user: User) -> bool:
    """Have SGLang abort what runs and waits for a session; whether anything did."""
    from sglang.srt.managers.io_struct import AbortReq

    under_way = {
        *scheduler.collect_inflight_reqs(),
        *scheduler.waiting_queue,
        *scheduler.grammar_manager.grammar_queue,
        *filter(None, (scheduler.chunked_req,)),
    }
    mine = [req for req in under_way if not req.finished() and _user(req) == user]
    others = [req.rid for req in under_way if _user(req) != user]
    for rid in sorted(req.rid for req in mine):  # ranks must all do alike
        # SGLang ends all whose id begins so, and ids are the clients'.
        if not any(other.startswith(rid) for other in others):
            scheduler.abort_request(AbortReq(rid=rid))
    return bool(mine)


def _user(req: Any) -> User | None:
    turn = asked_of(req)
    return None if turn is None else turn.channel.user

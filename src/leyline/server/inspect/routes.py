"""The list of sessions, a session's turns, and a stream of both as they change.

A session's id is the rest of the path under /v1/leyline/sessions/, so here it is a query parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leyline.api.inspect import SessionList, TurnList
from leyline.api.leyline_object import check_session
from leyline.server.errors import ApiError
from leyline.server.inspect.records import Records
from leyline.server.inspect.view import Texts, session_list, turn_list
from leyline.server.inspect.watcher import Watcher
from leyline.server.limits import STREAM_PATH
from leyline.server.prepare import State
from leyline.server.stream import STREAM_START, ClientGone, data, while_connected
from leyline.server.text import Text

router = APIRouter()
T = TypeVar("T")

ALIVE_S = 10.0
"""An event at least every so often: who gets none knows that the server is gone."""
PACE_S = 0.15
"""Between two events at least: a token each is too many."""

Last = Annotated[int | None, Query(ge=1, le=1_000_000)]


@router.get("/v1/leyline/sessions")
async def sessions(request: Request) -> SessionList:
    state: State = request.app.state.leyline
    return session_list(state.records, request.state.owner)


@router.get("/v1/leyline/turns")
async def turns(
    request: Request,
    session: str,
    last: Last = None,
    turn: Annotated[int | None, Query(ge=1)] = None,
    text: Texts = Texts.NONE,
) -> TurnList:
    """A session's turns; only the newest `last`, or only number `turn`."""
    state: State = request.app.state.leyline
    check_session(session)
    owner, records = request.state.owner, state.records
    seen = records.turns(owner, session, last, number=turn)
    if seen is None or (turn is not None and not seen.turns):
        raise _unknown(session, turn)
    return await _aside(request, lambda: turn_list(records, state.text, owner, session, seen, text))


@router.get(STREAM_PATH)
async def events(request: Request, session: str | None = None, last: Last = None) -> Response:
    """Events `sessions`, `turns` and `gone` (`session` is not on record, or no longer), and
    `alive`: what changed since the one before."""
    if session is not None:
        check_session(session)
    return Stream(request, session, last)


class Stream(Response):
    """What changes, as server-sent events, as long as the client is there."""

    def __init__(self, request: Request, session: str | None, last: int | None) -> None:
        super().__init__()
        state: State = request.app.state.leyline
        self._records: Records = state.records
        self._text: Text = state.text
        self._request = request
        self._owner: str = request.state.owner
        self._session = session
        self._last = last
        self._sessions: SessionList | None = None
        self._record: int | None = None
        self._version = 0
        self._said_gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._records.watch(self._owner) as watcher:
            try:
                await while_connected(receive, self._events(send, watcher))
            except ClientGone:
                pass

    async def _events(self, send: Send, watcher: Watcher) -> None:
        await send(STREAM_START)
        while not self._records.closed:
            if not (news := [*self._list(), *await self._turns()]):
                news = [_event("alive")]
            for each in news:
                await send(data(each))
            await watcher.wait(ALIVE_S, PACE_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _list(self) -> list[bytes]:
        found = session_list(self._records, self._owner)
        if found == self._sessions:
            return []
        self._sessions = found
        return [_event("sessions", found)]

    async def _turns(self) -> list[bytes]:
        if self._session is None:
            return []
        owner, session, records = self._owner, self._session, self._records
        seen = records.turns(owner, session, self._last, self._version)
        if seen is not None and self._record not in (None, seen.serial):
            # The session began anew: all of its turns are news.
            seen = records.turns(owner, session, self._last)
        if seen is None:
            said, self._said_gone = self._said_gone, True
            self._record, self._version = None, 0
            return [] if said else [_event("gone")]
        self._said_gone = False
        self._record, self._version = seen.serial, seen.version
        if not seen.turns:
            return []
        shown = seen

        def view() -> TurnList:
            return turn_list(records, self._text, owner, session, shown, Texts.NONE)

        return [_event("turns", await _aside(self._request, view))]


def _event(name: str, answer: BaseModel | None = None) -> bytes:
    body = "{}" if answer is None else answer.model_dump_json()
    return f"event: {name}\ndata: {body}\n\n".encode()


async def _aside(request: Request, work: Callable[[], T]) -> T:
    """One at a time: whoever looks must not take the threads that requests need."""
    app_state = request.app.state
    if not hasattr(app_state, "views"):
        app_state.views = CapacityLimiter(1)
    return await to_thread.run_sync(work, limiter=app_state.views)


def _unknown(session: str, turn: int | None) -> ApiError:
    which = f"turn {turn} of session" if turn is not None else "session"
    what = (
        f"{which} {session!r} is not on record: never used with this API key, dropped, expired, "
        "or too long ago"
    )
    return ApiError(404, what, param="session", code="session_not_found")

"""/v1/leyline/sessions/{id}: what is held for a session, dropping it, editing it now.

A session's id is the rest of the path, slashes included: it is data, never a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from leyline.api.leyline_object import LeylineReport, check_session
from leyline.api.sessions import DropAnswer, Segment, SessionAnswer, parse_edit
from leyline.engine.request import Delta, Done, Logprob, Sampling
from leyline.engine.request import Request as EngineRequest
from leyline.policy import Applied
from leyline.server.completions import tokens_of
from leyline.server.errors import ApiError
from leyline.server.inspect.records import Sent
from leyline.server.limits import read_body
from leyline.server.prepare import State, check_model, edited, load
from leyline.server.stream import EngineResponse

router = APIRouter(prefix="/v1/leyline/sessions")


@router.post("/{session:path}/directives")
async def edit(request: Request, session: str) -> Response:
    state: State = request.app.state.leyline
    check_session(session)
    body = await read_body(request, state.settings.max_body_bytes)
    return await to_thread.run_sync(_prepare, state, body, session, request.state.owner)


@router.get("/{session:path}")
async def show(request: Request, session: str) -> SessionAnswer:
    state: State = request.app.state.leyline
    check_session(session)
    view = await to_thread.run_sync(state.engine.session, request.state.owner, session)
    if view is None:
        raise _unknown(session)
    return SessionAnswer(
        session=session,
        tokens=view.tokens,
        cached=view.cached,
        exact=view.exact,
        edits=view.edits,
        max_rotations=view.max_rotations,
        age_s=round(view.age_s, 3),
        segments=[
            Segment(start=start, tokens=n, exact=exact, rotations=rotations)
            for start, n, exact, rotations in view.spans
        ],
    )


@router.delete("/{session:path}")
async def drop(request: Request, session: str, scrub: bool = False) -> DropAnswer:
    state: State = request.app.state.leyline
    check_session(session)
    work = partial(state.engine.drop_session, request.state.owner, session, scrub=scrub)
    forgotten = await to_thread.run_sync(work)
    # Also where the engine held nothing: it told of what it dropped.
    state.records.drop(request.state.owner, session)
    if forgotten is None:
        raise _unknown(session)
    return DropAnswer(
        session=session,
        dropped=True,
        freed=forgotten.freed,
        kept_by_others=forgotten.kept_by_others,
        scrubbed=scrub,
    )


def _prepare(state: State, body: bytes, session: str, owner: str) -> EngineResponse:
    options = parse_edit(load(body))
    check_model(options.model, state.engine)
    prompt: Any = None
    sent: Sent | None = None
    applied: tuple[Applied, ...] = ()
    if options.messages is not None:
        view = edited(options.policy, options.messages, state.text, "")
        applied = view.applied
        # The conversation goes on with what the tools say: no turn of the assistant is opened.
        kwargs = options.chat_template_kwargs
        prompt = state.text.render(view.messages, options.tools or None, kwargs, to_answer=False)
        sent = Sent(view.messages, options.tools or None, kwargs, len(body))
    elif options.prompt is not None:
        prompt = tokens_of(state.text, options.prompt)
    channel = options.channel(session, owner)
    return EngineResponse(
        state.engine,
        state.metrics,
        EngineRequest(prompt, Sampling(max_tokens=0), channel),
        ReportSurface(applied),
        prefix="",
        prompt="messages" if options.messages is not None else "prompt",
        recording=state.records.recording(channel, "directives", sent, applied),
    )


class ReportSurface:
    """Only the report."""

    def __init__(self, applied: Sequence[Applied]) -> None:
        self._applied = applied

    def chunks(self, event: Delta | Done) -> Iterable[BaseModel]:
        return ()

    def whole(self, text: str, logprobs: list[Logprob], done: Done) -> BaseModel:
        report = LeylineReport.of(done.report, self._applied)
        assert report is not None
        return report


def _unknown(session: str) -> ApiError:
    what = f"session {session!r} is unknown: never used with this API key, dropped or expired"
    return ApiError(404, what, param="session", code="session_not_found")

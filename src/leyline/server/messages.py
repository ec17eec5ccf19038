"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from leyline.api.anthropic import CountRequest, parse_count, parse_messages
from leyline.api.anthropic_answers import (
    AnthropicUsage,
    AppliedEdits,
    BlockDelta,
    BlockStart,
    BlockStop,
    CountAnswer,
    Ending,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    OriginalTokens,
    Ping,
    TextBlock,
    TextDelta,
)
from leyline.api.context_management import apply
from leyline.api.leyline_object import LeylineReport
from leyline.api.messages import Message
from leyline.channel import EngineError, Report
from leyline.engine.request import Delta, Done, Logprob
from leyline.engine.request import Request as EngineRequest
from leyline.policy import Applied, Edited
from leyline.server.attended import Attended
from leyline.server.errors import ApiError
from leyline.server.inspect.records import Sent
from leyline.server.limits import read_body
from leyline.server.prepare import State, check_model, edited, load, sampling_of
from leyline.server.stream import EngineResponse

router = APIRouter()


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    state: State = request.app.state.leyline
    body = await read_body(request, state.settings.max_body_bytes)
    return await to_thread.run_sync(_prepare, state, body, request.state.owner)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    state: State = request.app.state.leyline
    body = await read_body(request, state.settings.max_body_bytes)
    answer = await to_thread.run_sync(_count, state, body)
    return Response(answer.model_dump_json(), media_type="application/json")


def _prepare(state: State, body: bytes, owner: str) -> EngineResponse:
    request = parse_messages(load(body))
    check_model(request.model, state.engine)
    made, edits = _prompt(state, request)
    prompt, view = made.prompt, made.view
    tools, kwargs = request.offered_tools, request.template_kwargs
    leyline, channel, attended = request.channel, None, None
    if leyline is not None:
        channel = leyline.channel(leyline.session, owner)
        # Takes long with many messages, and the engine refuses a prompt that is too long.
        if channel.attention and len(prompt) <= state.engine.max_tokens:
            attended = Attended.to(state.text, view, made.given, tools, kwargs)
    sampling = sampling_of(request, state.defaults)
    # max_tokens is a bound here and no demand: clients ask for more than small models take.
    room = int(state.engine.max_tokens) - len(prompt)
    cut = sampling.max_tokens is not None and 0 < room < sampling.max_tokens
    surface = MessageSurface(state.engine.name, Cleared(edits, view.applied, attended), cut)
    sent = Sent(view.messages, tools, kwargs, len(body))
    return EngineResponse(
        state.engine,
        state.metrics,
        EngineRequest(
            prompt,
            replace(sampling, max_tokens=room) if cut else sampling,
            channel,
        ),
        surface,
        stream=bool(request.stream),
        framing=surface,
        prompt="messages",
        recording=state.records.recording(channel, "messages", sent, view.applied),
    )


def _count(state: State, body: bytes) -> CountAnswer:
    request = parse_count(load(body))
    check_model(request.model, state.engine)
    made, edits = _prompt(state, request)
    answer = CountAnswer(input_tokens=len(made.prompt))
    if edits is not None:
        original = _render(state, request, request.messages).prompt
        answer.context_management = OriginalTokens(original_input_tokens=len(original))
    return answer


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was done to the messages. edits: by `context_management`; None without one. policies:
    by the `leyline` object's. attended: where attention is asked for."""

    edits: AppliedEdits | None
    policies: tuple[Applied, ...]
    attended: Attended | None

    def report(self, done: Done) -> LeylineReport | None:
        """With what was done here."""
        attention = None if self.attended is None else self.attended.of(done)
        return LeylineReport.of(done.report, self.policies, attention)


def _prompt(state: State, request: CountRequest) -> tuple[Rendered, AppliedEdits | None]:
    """The edited conversation, and what `context_management` did to it."""
    messages, edits = request.messages, None
    if request.rules is not None:
        managed = apply(request.rules, messages, state.text.count, _head(state, request))
        messages, edits = managed.messages, AppliedEdits(applied_edits=list(managed.applied))
    return _render(state, request, messages), edits


def _head(state: State, request: CountRequest) -> int:
    """Tokens of a prompt that has no messages yet: system prompt, tools, what opens the answer."""
    # Without the policy, which is for the conversation.
    chat = request.chat([{"role": "user", "content": ""}])
    return len(state.text.render(chat, request.offered_tools, request.template_kwargs))


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, int64 `[n]`, and the conversation in it, of which `given` messages were given."""

    prompt: np.ndarray
    view: Edited
    given: int


def _render(state: State, request: CountRequest, messages: list[Message]) -> Rendered:
    policy = None if request.channel is None else request.channel.policy
    chat = request.chat(messages)
    view = edited(policy, chat, state.text, "leyline")
    prompt = state.text.render(view.messages, request.offered_tools, request.template_kwargs)
    return Rendered(prompt, view, len(chat))


class MessageSurface:
    """An answer on the wire, and the events of a streamed one."""

    def __init__(self, model: str, cleared: Cleared, cut: bool) -> None:
        """cut: the answer may have fewer tokens than were asked for."""
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._cleared = cleared
        self._cut = cut
        self._open = False

    def chunks(self, event: Delta | Done) -> Iterable[BaseModel]:
        if isinstance(event, Delta):
            if not event.text:
                return
            if not self._open:
                self._open = True
                yield BlockStart(content_block=TextBlock(text=""))
            yield BlockDelta(delta=TextDelta(text=event.text))
            return
        ending = self._ending(event)
        if self._open:
            yield BlockStop()
        yield MessageDelta(
            delta=ending,
            usage=_usage(event.report, event.completion_tokens),
            context_management=self._cleared.edits,
            leyline=self._cleared.report(event),
        )
        yield MessageStop()

    def whole(self, text: str, logprobs: list[Logprob], done: Done) -> MessageAnswer:
        ending = self._ending(done)
        return MessageAnswer(
            id=self._id,
            model=self._model,
            content=[TextBlock(text=text)] if text else [],
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            usage=_usage(done.report, done.completion_tokens),
            context_management=self._cleared.edits,
            leyline=self._cleared.report(done),
        )

    def opening(self, report: Report) -> bytes:
        start = MessageAnswer(
            id=self._id,
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(report, 0),
        )
        return self.event(MessageStart(message=start)) + self.event(Ping())

    def event(self, chunk: BaseModel) -> bytes:
        name = getattr(chunk, "type", "")
        return f"event: {name}\ndata: {chunk.model_dump_json()}\n\n".encode()

    def closing(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"

    def _ending(self, done: Done) -> Ending:
        """Why the answer ends. Raises EngineError for one that was not let to its end."""
        if done.reason == "abort":
            raise EngineError("aborted", "the request was ended before its answer was whole")
        if done.stopped_by is not None:
            return Ending(stop_reason="stop_sequence", stop_sequence=done.stopped_by)
        reason = {"stop": "end_turn", "length": "max_tokens"}[done.reason]
        if done.reason == "length" and self._cut:
            reason = "model_context_window_exceeded"
        return Ending(stop_reason=reason, stop_sequence=None)


def _usage(report: Report, output: int) -> AnthropicUsage:
    return AnthropicUsage.of(report.prompt, report.cached, output)

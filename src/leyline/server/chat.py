"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence

from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from leyline.api.leyline_object import LeylineReport
from leyline.api.openai import ChatRequest, parse_chat
from leyline.api.openai_answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from leyline.engine.request import Delta, Done, Logprob
from leyline.engine.request import Request as EngineRequest
from leyline.policy import Applied, Edited
from leyline.server.attended import Attended
from leyline.server.inspect.records import Sent
from leyline.server.limits import read_body
from leyline.server.prepare import State, check_model, edited, load, sampling_of
from leyline.server.stream import EngineResponse
from leyline.server.text import Text

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(request: Request) -> Response:
    state: State = request.app.state.leyline
    body = await read_body(request, state.settings.max_body_bytes)
    return await to_thread.run_sync(_prepare, state, body, request.state.owner)


def _prepare(state: State, body: bytes, owner: str) -> EngineResponse:
    request = parse_chat(load(body))
    check_model(request.model, state.engine)
    channel, view, attended = None, Edited.nothing(request.conversation), None
    if (leyline := request.channel) is not None:
        channel = leyline.channel(leyline.session, owner)
        view = edited(leyline.policy, view.messages, state.text, "leyline")
    tools, kwargs = request.offered_tools, request.template_kwargs
    prompt = state.text.render(view.messages, tools, kwargs)
    # Takes long with many messages, and the engine refuses a prompt that is too long.
    if channel is not None and channel.attention and len(prompt) <= state.engine.max_tokens:
        attended = Attended.to(state.text, view, len(request.conversation), tools, kwargs)
    return EngineResponse(
        state.engine,
        state.metrics,
        EngineRequest(prompt, sampling_of(request, state.defaults), channel),
        ChatSurface(request, state.engine.name, state.text, view.applied, attended),
        stream=bool(request.stream),
        prompt="messages",
        recording=state.records.recording(
            channel, "chat", Sent(view.messages, tools, kwargs, len(body)), view.applied
        ),
    )


class ChatSurface:
    """A chat completion on the wire."""

    def __init__(
        self,
        request: ChatRequest,
        model: str,
        text: Text,
        applied: Sequence[Applied] = (),
        attended: Attended | None = None,
    ) -> None:
        """applied: what policies did to the messages. attended: where attention is asked for."""
        self._include_usage = request.include_usage
        self._with_logprobs = request.alternatives is not None
        self._text = text
        self._applied = applied
        self._attended = attended
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._first = True

    def chunks(self, event: Delta | Done) -> Iterable[ChatChunk]:
        if isinstance(event, Delta):
            if event.text or event.logprobs:
                yield self._chunk(event.text, logprobs=self._logprobs(event.logprobs))
            return
        last = self._chunk(reason=event.reason)
        tail = last
        if self._include_usage:
            tail = ChatChunk(id=self._id, created=self._created, model=self._model, choices=[])
            yield last
        # The report is in the last chunk, with the usage; that has no choices only if asked for.
        tail.leyline = self._report(event)
        if self._include_usage or tail.leyline is not None:
            tail.usage = usage_of(event)
        yield tail

    def whole(self, text: str, logprobs: list[Logprob], done: Done) -> ChatAnswer:
        choice = ChatChoice(
            message=ChatMessage(content=text),
            logprobs=self._logprobs(logprobs),
            finish_reason=done.reason,
        )
        return ChatAnswer(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choice],
            usage=usage_of(done),
            leyline=self._report(done),
        )

    def _report(self, done: Done) -> LeylineReport | None:
        attention = None if self._attended is None else self._attended.of(done)
        return LeylineReport.of(done.report, self._applied, attention)

    def _chunk(
        self,
        text: str | None = None,
        reason: str | None = None,
        logprobs: ChatLogprobs | None = None,
    ) -> ChatChunk:
        delta = ChatDelta(content=text)
        if self._first:
            self._first = False
            delta = ChatDelta(role="assistant", content=text or "")
        choice = ChatChunkChoice(delta=delta, logprobs=logprobs, finish_reason=reason)
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=[choice])

    def _logprobs(self, logprobs: Sequence[Logprob]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        content = []
        for each in logprobs:
            token, raw = self._text.piece(each.token)
            top = []
            for other, value in each.top:
                name, name_bytes = self._text.piece(other)
                top.append(TopLogprob(token=name, bytes=list(name_bytes), logprob=value))
            content.append(
                TokenLogprob(token=token, bytes=list(raw), logprob=each.logprob, top_logprobs=top)
            )
        return ChatLogprobs(content=content)


def usage_of(done: Done) -> Usage:
    """The answer's token counts."""
    return Usage.of(done.report.prompt, done.completion_tokens, done.report.cached)

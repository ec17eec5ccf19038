"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence

import numpy as np
from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from leyline.api.leyline_object import LeylineReport
from leyline.api.openai import CompletionRequest, parse_completion
from leyline.api.openai_answers import TextAnswer, TextChoice, TextLogprobs
from leyline.engine.request import Delta, Done, Logprob
from leyline.engine.request import Request as EngineRequest
from leyline.server.attended import of_tokens
from leyline.server.chat import usage_of
from leyline.server.limits import read_body
from leyline.server.prepare import State, check_model, load, sampling_of
from leyline.server.stream import EngineResponse
from leyline.server.text import Text

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    state: State = request.app.state.leyline
    body = await read_body(request, state.settings.max_body_bytes)
    return await to_thread.run_sync(_prepare, state, body, request.state.owner)


def _prepare(state: State, body: bytes, owner: str) -> EngineResponse:
    request = parse_completion(load(body))
    check_model(request.model, state.engine)
    leyline = request.channel
    channel = None if leyline is None else leyline.channel(leyline.session, owner)
    prompt = tokens_of(state.text, request.prompt)
    return EngineResponse(
        state.engine,
        state.metrics,
        EngineRequest(prompt, sampling_of(request, state.defaults), channel),
        TextSurface(request, state.engine.name, state.text),
        stream=bool(request.stream),
        recording=state.records.recording(channel, "completions"),
    )


def tokens_of(text: Text, prompt: str | list[int]) -> np.ndarray:
    """A prompt, text or token ids, as tokens, int64 `[n]`."""
    if isinstance(prompt, str):
        return text.encode(prompt)
    return np.array(prompt, dtype=np.int64)


class TextSurface:
    """A text completion on the wire."""

    def __init__(self, request: CompletionRequest, model: str, text: Text) -> None:
        self._include_usage = request.include_usage
        self._with_logprobs = request.alternatives is not None
        self._text = text
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._offset = 0

    def chunks(self, event: Delta | Done) -> Iterable[TextAnswer]:
        if isinstance(event, Delta):
            if event.text or event.logprobs:
                yield self._answer(event.text, event.logprobs)
            return
        last = self._answer("", (), event.reason)
        tail = last
        if self._include_usage:
            tail = TextAnswer(id=self._id, created=self._created, model=self._model, choices=[])
            yield last
        tail.leyline = LeylineReport.of(event.report, attention=of_tokens(event))
        if self._include_usage or tail.leyline is not None:
            tail.usage = usage_of(event)
        yield tail

    def whole(self, text: str, logprobs: list[Logprob], done: Done) -> TextAnswer:
        answer = self._answer(text, logprobs, done.reason)
        answer.usage = usage_of(done)
        answer.leyline = LeylineReport.of(done.report, attention=of_tokens(done))
        return answer

    def _answer(
        self, text: str, logprobs: Sequence[Logprob], reason: str | None = None
    ) -> TextAnswer:
        choice = TextChoice(text=text, logprobs=self._logprobs(logprobs), finish_reason=reason)
        return TextAnswer(id=self._id, created=self._created, model=self._model, choices=[choice])

    def _logprobs(self, logprobs: Sequence[Logprob]) -> TextLogprobs | None:
        if not self._with_logprobs or not logprobs:
            return None
        out = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for each in logprobs:
            token, _ = self._text.piece(each.token)
            out.tokens.append(token)
            out.token_logprobs.append(each.logprob)
            # Pieces of characters can look alike: the likelier one stays.
            top = {self._text.piece(other)[0]: value for other, value in reversed(each.top)}
            out.top_logprobs.append({**top, token: each.logprob})
            out.text_offset.append(self._offset)
            self._offset += len(token)
        return out

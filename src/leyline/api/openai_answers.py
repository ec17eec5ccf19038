"""Answers of the OpenAI API: whole ones, chunks of streamed ones, models, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, model_serializer

from leyline.api.leyline_object import LeylineReport


class Wire(BaseModel):
    """An object on the wire. None is written as null, but for fields in `optional`: left out."""

    optional: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _write(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        out = write(self)
        for name in self.optional:
            if out.get(name) is None:
                out.pop(name, None)
        return out


class PromptDetails(Wire):
    cached_tokens: int


class Usage(Wire):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
        )


class TopLogprob(Wire):
    """A token as text, its UTF-8 bytes (maybe a part of a character), its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Wire):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(Wire):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Wire):
    index: int = 0
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatAnswer(Wire):
    optional = ("leyline",)

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    leyline: LeylineReport | None = None


class ChatDelta(Wire):
    optional = ("role", "content")

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Wire):
    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Wire):
    optional = ("usage", "leyline")

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    leyline: LeylineReport | None = None


class TextLogprobs(Wire):
    """Four lists, an entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Wire):
    index: int = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class TextAnswer(Wire):
    """A completion, or a chunk of it: both look alike."""

    optional = ("usage", "leyline")

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    leyline: LeylineReport | None = None


class Model(Wire):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "leyline"
    max_model_len: int


class ModelList(Wire):
    object: Literal["list"] = "list"
    data: list[Model]


class Problem(Wire):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Wire):
    error: Problem

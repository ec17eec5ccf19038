"""Answers of Anthropic's Messages API: whole ones, events of streamed ones, counts, errors."""

from __future__ import annotations

from typing import Literal

from leyline.api.context_management import AppliedEdit
from leyline.api.leyline_object import LeylineReport
from leyline.api.openai_answers import Wire


class AnthropicUsage(Wire):
    """input_tokens are those that were computed; the prompt's other ones were read from the cache.
    Rows are kept as they come, so that none are counted as written to it."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int

    @classmethod
    def of(cls, prompt: int, cached: int, output: int) -> AnthropicUsage:
        return cls(
            input_tokens=prompt - cached, cache_read_input_tokens=cached, output_tokens=output
        )


class AppliedEdits(Wire):
    """The `context_management` object of an answer."""

    applied_edits: list[AppliedEdit]


class TextBlock(Wire):
    type: Literal["text"] = "text"
    text: str


class MessageAnswer(Wire):
    optional = ("context_management", "leyline")

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage
    context_management: AppliedEdits | None = None
    leyline: LeylineReport | None = None


class MessageStart(Wire):
    type: Literal["message_start"] = "message_start"
    message: MessageAnswer


class Ping(Wire):
    type: Literal["ping"] = "ping"


class BlockStart(Wire):
    type: Literal["content_block_start"] = "content_block_start"
    index: int = 0
    content_block: TextBlock


class TextDelta(Wire):
    type: Literal["text_delta"] = "text_delta"
    text: str


class BlockDelta(Wire):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int = 0
    delta: TextDelta


class BlockStop(Wire):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int = 0


class Ending(Wire):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Wire):
    optional = ("context_management", "leyline")

    type: Literal["message_delta"] = "message_delta"
    delta: Ending
    usage: AnthropicUsage
    context_management: AppliedEdits | None = None
    leyline: LeylineReport | None = None


class MessageStop(Wire):
    type: Literal["message_stop"] = "message_stop"


class OriginalTokens(Wire):
    """The `context_management` object of a count: tokens before the edits."""

    original_input_tokens: int


class CountAnswer(Wire):
    optional = ("context_management",)

    input_tokens: int
    context_management: OriginalTokens | None = None


class AnthropicProblem(Wire):
    type: str
    message: str


class AnthropicError(Wire):
    type: Literal["error"] = "error"
    error: AnthropicProblem

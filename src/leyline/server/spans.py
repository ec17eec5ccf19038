"""Where each message of a conversation stands in its prompt."""

from __future__ import annotations

from typing import Any

from leyline.api.errors import FieldError
from leyline.api.messages import Message
from leyline.server.text import Text

_OTHER = "\ufffe"
"""No template, and hardly a message, begins with it."""


def message_spans(
    text: Text,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> list[tuple[int, int]]:
    """Token ranges `(start, end)` of the messages in `text.render(messages, …)`, in order.

    They follow one another: what a template puts in front of the first message is the first one's,
    and what is behind the last one, to open the answer, is nobody's. Renders the beginning of the
    conversation once for each message, so it takes a time that grows with its square.
    """
    whole = text.written(messages, tools, kwargs, to_answer=True)
    ends = [_end(text, whole, messages, i, tools, kwargs) for i in range(len(messages))]
    for i in range(len(ends) - 1, 0, -1):  # one that can't be told is as long as the next allows
        ends[i - 1] = min(ends[i - 1], ends[i])
    tokens = text.tokens_before(whole, ends)
    return list(zip([0, *tokens[:-1]], tokens, strict=True))


def _end(
    text: Text,
    whole: str,
    messages: list[Message],
    i: int,
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any] | None,
) -> int:
    """Where message i ends in the text."""
    try:
        beginning = text.written(messages[: i + 1], tools, kwargs, to_answer=False)
        if whole.startswith(beginning):
            return len(beginning)
    except FieldError:  # templates refuse conversations that end in the middle of something
        beginning = None
    if i + 1 < len(messages):
        # Else where the next one's own text begins, behind its heading.
        other = [*messages[: i + 1], {**messages[i + 1], "content": _OTHER}, *messages[i + 2 :]]
        try:
            return _common(whole, text.written(other, tools, kwargs, to_answer=True))
        except FieldError:
            pass
    return len(whole) if beginning is None else _common(whole, beginning)


def _common(a: str, b: str) -> int:
    """Length of what both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[:middle]):
            low = middle
        else:
            high = middle - 1
    return low

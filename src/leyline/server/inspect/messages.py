"""Which tokens of a prompt belong to which message."""

from __future__ import annotations

import numpy as np

from leyline.api.errors import FieldError
from leyline.server.inspect.records import Bound, Sent
from leyline.server.spans import message_spans
from leyline.server.text import Text

MOST_BYTES = 40_000_000
"""To have the chat template write for one prompt: it is asked once for each message."""


def bounds_of(text: Text, sent: Sent, tokens: np.ndarray) -> tuple[Bound, ...]:
    """The messages' parts of the prompt `tokens`, int `[n]`; they cover it once, in order. Empty
    where that is not known. Slow on long prompts: not for the event loop."""
    if len(sent.messages) * sent.size > MOST_BYTES:
        return ()
    try:
        spans = message_spans(text, sent.messages, sent.tools, sent.kwargs)
    except FieldError:
        return ()
    bounds = [
        Bound(i, str(message.get("role", "")), start, end - start)
        for i, (message, (start, end)) in enumerate(zip(sent.messages, spans, strict=True))
    ]
    at = spans[-1][1]
    if at > len(tokens):  # explicit directives made something else of it
        return ()
    if at < len(tokens):
        bounds.append(Bound(None, "assistant", at, len(tokens) - at))
    return tuple(bounds)

"""What each message of a request got of the model's attention, from what each token did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leyline.api.errors import FieldError
from leyline.engine.request import Done
from leyline.policy import Edited
from leyline.server.spans import message_spans
from leyline.server.text import Text

DIGITS = 6
MOST_MESSAGES = 2000
"""To be told apart in one prompt, which takes a time that grows with their square."""


@dataclass(frozen=True, slots=True)
class Attended:
    """spans: of the messages that were sent, as token ranges. origins: their places among the
    `given` messages of the request."""

    spans: Sequence[tuple[int, int]]
    origins: Sequence[int | None]
    given: int

    @classmethod
    def to(
        cls,
        text: Text,
        view: Edited,
        given: int,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Attended:
        """For a conversation as policies left it, rendered as it is for the prompt. Raises
        FieldError for more than MOST_MESSAGES."""
        if (n := len(view.messages)) > MOST_MESSAGES:
            what = f"goes with up to {MOST_MESSAGES} messages, and there are {n}."
            raise FieldError("leyline.attention", what)
        return cls(message_spans(text, view.messages, tools, kwargs), view.origins, given)

    def of(self, done: Done) -> list[float | None] | None:
        """One number for each message given, None for one that was dropped."""
        if done.attention is None:
            return None
        found: list[float | None] = [None] * self.given
        for origin, (start, end) in zip(self.origins, self.spans, strict=True):
            if origin is not None:
                share = float(done.attention[start:end].sum()) + (found[origin] or 0.0)
                found[origin] = round(share, DIGITS)
        return found


def of_tokens(done: Done) -> list[float | None] | None:
    """One number for each token of a prompt that is no chat."""
    return None if done.attention is None else done.attention.round(DIGITS).tolist()

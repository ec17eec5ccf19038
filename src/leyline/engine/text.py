"""Tokens to text, a few at a time: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_CONTEXT = 5
"""Tokens decoded along with new ones, as what a token adds can depend on those before it."""


@dataclass
class TextStream:
    """The text of one answer as it grows.

    tokenizer: None for engines without one; the text stays empty then.
    """

    tokenizer: Any
    stop: tuple[str, ...] = ()
    stopped_by: str | None = None
    tokens: list[int] = field(default_factory=list)
    _read: int = 0  # tokens whose text is out or held back
    _held: str = ""  # text that may be the beginning of a stop string

    def push(self, token: int) -> str:
        """Add a token; returns the text that can be shown now. A stop string sets `stopped_by`."""
        self.tokens.append(token)
        return self._emit(self._decode(final=False))

    def flush(self) -> str:
        """The rest, at the end of an answer: half characters and what looked like a stop string."""
        if self.stopped_by is not None:
            return ""
        text = self._emit(self._decode(final=True))
        held, self._held = self._held, ""
        return text + ("" if self.stopped_by is not None else held)

    def _decode(self, final: bool) -> str:
        """Text of the tokens not read yet; "" while their last character is incomplete."""
        if self.tokenizer is None or self._read == len(self.tokens):
            return ""
        first = max(0, self._read - _CONTEXT)
        before = self._text(self.tokens[first : self._read])
        after = self._text(self.tokens[first:])
        if after.endswith("\ufffd") and not final:
            return ""
        self._read = len(self.tokens)
        return after[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _emit(self, text: str) -> str:
        self._held += text
        found = [(at, s) for s in self.stop if (at := self._held.find(s)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            out, self._held = self._held[:at], ""
            return out
        keep = max((_overlap(self._held, s) for s in self.stop), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0

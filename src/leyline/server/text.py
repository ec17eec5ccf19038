"""Messages to a prompt, text to tokens, tokens to text and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from leyline.api.errors import FieldError
from leyline.api.messages import Message, for_template


class Text:
    """A tokenizer and its chat template. Slow on long prompts: not for the event loop.

    tokenizer: of Transformers; None for an engine without one, which takes token ids only.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if tokenizer is not None:
            # The first call may change settings of the tokenizer; later ones, which may be on
            # several threads at a time, only read them.
            tokenizer("", add_special_tokens=False)

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        to_answer: bool = True,
    ) -> np.ndarray:
        """The conversation as tokens, int64 `[n]`; `to_answer` opens the assistant's turn.

        Raises FieldError with the chat template's own sentence if it refuses the messages.
        """
        return self._tokens(self.written(messages, tools, kwargs, to_answer=to_answer), False)

    def written(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        to_answer: bool = True,
    ) -> str:
        """The same as text."""
        self._needed("messages")
        if not self.tokenizer.chat_template:
            raise FieldError("messages", "this model has no chat template; use /v1/completions.")
        try:
            text: str = self.tokenizer.apply_chat_template(
                for_template(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=to_answer,
                **(kwargs or {}),
            )
        except Exception as error:  # templates fail in many ways on what they don't expect
            what = f"{error}" or type(error).__name__
            raise FieldError("messages", what, "chat_template_failed") from error
        return text

    def tokens_before(self, text: str, places: Sequence[int]) -> list[int]:
        """How many tokens of the text begin before each of these characters."""
        if not self.tokenizer.is_fast:
            return [len(self._tokens(text[:place], special=False)) for place in places]
        found = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        begins = np.array([start for start, _ in found.offset_mapping], dtype=np.int64)
        return np.searchsorted(begins, places).tolist()

    def encode(self, text: str) -> np.ndarray:
        """Text as tokens, int64 `[n]`, with those that the tokenizer puts in front."""
        self._needed("prompt")
        return self._tokens(text, special=True)

    def count(self, text: str) -> int:
        """Tokens of a text by itself."""
        self._needed("messages")
        return len(self._tokens(text, special=False))

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text, special ones included; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(
            tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def piece(self, token: int) -> tuple[str, bytes]:
        """A token as text and as bytes. A part of a character is written `bytes:\\xe2\\x82`."""
        if self.tokenizer is None:
            return f"token:{token}", b""
        text = self.tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if "\ufffd" not in text:
            return text, text.encode()
        raw = _raw_bytes(self.tokenizer.convert_ids_to_tokens(token))
        if raw is None:
            return text, text.encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _tokens(self, text: str, special: bool) -> np.ndarray:
        ids = self.tokenizer(text, add_special_tokens=special, verbose=False).input_ids
        return np.array(ids, dtype=np.int64)

    def _needed(self, field: str) -> None:
        if self.tokenizer is None:
            raise FieldError(field, "this server has no tokenizer; send token ids as a prompt.")


def _byte_letters() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable ones as themselves, the others as the
    letters from U+0100 on (the alphabet of GPT-2's tokenizer)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _raw_bytes(token: str | None) -> bytes | None:
    """The bytes that a token's name stands for, None if it is not that kind of name."""
    if not token:
        return None
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    if all(letter in _LETTERS for letter in token):
        return bytes(_LETTERS[letter] for letter in token)
    return None

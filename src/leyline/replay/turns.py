"""A recorded session's calls as tokens: prompts as the model's own template renders them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leyline.policy import PLACEHOLDER, clear_tool_outputs
from leyline.traces import Message, Session, calls


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call. prompt: token ids, int64. answer: as it is tokenized in the next prompt."""

    prompt: np.ndarray
    answer: tuple[int, ...]


def turns_of(
    tokenizer: Any, session: Session, *, keep: int = 2, placeholder: str = PLACEHOLDER
) -> list[Turn]:
    """A session's calls as tokens, with all but the newest `keep` tool outputs cleared."""
    turns = []
    for call in calls(session):
        messages = clear_tool_outputs(call.messages, keep=keep, placeholder=placeholder)
        text = render(tokenizer, messages)
        answered = [*messages, {"role": "assistant", "content": call.answer}]
        whole = tokenizer.apply_chat_template(answered, tokenize=False)
        prompt = encode(tokenizer, text)
        turns.append(Turn(prompt, _answer(tokenizer, call.answer, text, whole, prompt)))
    return turns


def fitting(turns: Sequence[Turn], max_tokens: int) -> int:
    """How many turns, from the first on, fit into `max_tokens` with their answers."""
    for i, turn in enumerate(turns):
        if len(turn.prompt) + len(turn.answer) > max_tokens:
            return i
    return len(turns)


def render(tokenizer: Any, messages: list[Message]) -> str:
    """The prompt as text."""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """Token ids of rendered text, int64; special tokens are those in the text."""
    return np.asarray(tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int64)


def _answer(
    tokenizer: Any, said: str, text: str, whole: str, prompt: np.ndarray
) -> tuple[int, ...]:
    """The answer's tokens up to the end-of-turn token that the model itself would end with."""
    rest = whole[len(text) :] if whole.startswith(text) else said
    tokens = encode(tokenizer, whole)
    n = len(prompt)
    if rest is not said and np.array_equal(tokens[:n], prompt):
        tokens = tokens[n:]
    else:  # the template does not show the answer as it was given, or it merges with the prompt
        tokens = encode(tokenizer, rest)
    ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
    if len(ends):
        tokens = tokens[: ends[-1] + 1]
    return tuple(tokens.tolist()) or (tokenizer.eos_token_id or 0,)

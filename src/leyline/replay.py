"""A recorded session, replayed against an engine in this process.

Each model call is sent as a chat client would send it: a policy edits the messages, the model's own
template renders them, and the answer that was recorded is taken instead of a new one, so that
every arm sees the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from leyline.policy import PLACEHOLDER, clear_tool_outputs
from leyline.traces import Session, calls

if TYPE_CHECKING:
    from leyline.engine.engine import Engine

Arm = Literal["prefix", "leyline"]
"""prefix: plain requests, so only an exact prefix is cached. leyline: requests with a session."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call. prompt: token ids, int64. answer: as it is tokenized in the next prompt."""

    prompt: np.ndarray
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What one call cost. cached = shared + moved; prompt = cached + computed."""

    prompt_tokens: int
    cached_tokens: int
    moved_tokens: int
    computed_tokens: int
    ttft_s: float
    edits: int
    fallback: str | None


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm's calls."""

    arm: Arm
    turns: tuple[TurnResult, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def cached_tokens(self) -> int:
        return sum(turn.cached_tokens for turn in self.turns)

    @property
    def computed_tokens(self) -> int:
        return sum(turn.computed_tokens for turn in self.turns)

    @property
    def ttft_s(self) -> float:
        return sum(turn.ttft_s for turn in self.turns)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.turns else 0.0


def turns_of(
    tokenizer: Any, session: Session, *, keep: int = 2, placeholder: str = PLACEHOLDER
) -> list[Turn]:
    """A session's calls as tokens, with all but the newest `keep` tool outputs cleared."""
    turns = []
    for call in calls(session):
        messages = clear_tool_outputs(call.messages, keep=keep, placeholder=placeholder)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        answered = [*messages, {"role": "assistant", "content": call.answer}]
        whole = tokenizer.apply_chat_template(answered, tokenize=False)
        prompt = encode(tokenizer, text)
        turns.append(Turn(prompt, _answer(tokenizer, call.answer, text, whole, prompt)))
    return turns


def replay(
    engine: Engine,
    turns: Sequence[Turn],
    arm: Arm,
    name: str = "replay",
    on_turn: Callable[[TurnResult], None] = lambda result: None,
) -> ArmResult:
    """Send the turns one after the other; each waits for the one before. The engine's cache is left
    as it is at the start. name: of the session, for the arm that has one."""
    from leyline.channel import Channel
    from leyline.engine.request import Sampling

    channel = Channel(name) if arm == "leyline" else None
    results = []
    for turn in turns:
        answer = engine.generate(turn.prompt, Sampling(forced=turn.answer), channel)
        report = answer.report
        assert report is not None and answer.ttft_s is not None
        result = TurnResult(
            prompt_tokens=report.prompt,
            cached_tokens=report.cached,
            moved_tokens=report.moved,
            computed_tokens=report.computed,
            ttft_s=answer.ttft_s,
            edits=len(report.edits),
            fallback=report.fallback,
        )
        results.append(result)
        on_turn(result)
    return ArmResult(arm, tuple(results))


def fitting(turns: Sequence[Turn], max_tokens: int) -> int:
    """How many turns, from the first on, fit into `max_tokens` with their answers."""
    for i, turn in enumerate(turns):
        if len(turn.prompt) + len(turn.answer) > max_tokens:
            return i
    return len(turns)


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

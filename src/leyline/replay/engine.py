"""A recorded session, replayed against an engine in this process.

Each model call is sent as a chat client would send it: a policy edits the messages, the model's own
template renders them, and the answer that was recorded is taken instead of a new one, so that
every arm sees the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from leyline.replay.turns import Turn

if TYPE_CHECKING:
    from leyline.engine.engine import Engine

Arm = Literal["prefix", "leyline"]
"""prefix: plain requests, so only an exact prefix is cached. leyline: requests with a session."""


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

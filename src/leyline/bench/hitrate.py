"""Prompt tokens cached over recorded sessions: exact prefix against Leyline.

Counts don't depend on weights: by default a tiny random model does, with the real tokenizer.
Prompts longer than the model was made for are let through, as answers are recorded and not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyline.bench.row import Row
from leyline.replay import Arm, ArmResult, replay, turns_of
from leyline.traces import Session

if TYPE_CHECKING:
    from leyline.engine.engine import Engine

GOAL = 0.89
MAX_TOKENS = 1 << 16
ARMS: tuple[Arm, ...] = ("prefix", "leyline")


def tiny_engine(tokenizer: Any) -> Engine:
    """An engine that counts right and computes little."""
    from leyline.engine.engine import Config, Engine
    from leyline.tiny import tiny_model

    model = tiny_model(
        "llama",
        vocab_size=len(tokenizer),
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        hidden_size=32,
        head_dim=32,
    )
    config = Config(memory_gib=0.03, max_tokens=MAX_TOKENS, max_sessions=4)
    return Engine(model, tokenizer, config, "tiny-llama")


def real_engine(path: Path) -> Engine:
    """The model itself, with prompts of any length let through."""
    from leyline.engine.engine import Config, Engine

    return Engine.load(path, config=Config(memory_gib=2.0, max_tokens=MAX_TOKENS))


def run(
    engine: Engine,
    sessions: Sequence[Session],
    keep: int = 2,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """One row an arm over all sessions. Nothing is shared between sessions."""
    found: dict[Arm, list[ArmResult]] = {arm: [] for arm in ARMS}
    for i, session in enumerate(sessions):
        say(f"session {i + 1} of {len(sessions)}")
        turns = turns_of(engine.tokenizer, session, keep=keep)
        for arm in ARMS:
            engine.reset()
            found[arm].append(replay(engine, turns, arm, session.id))
    engine.reset()
    return [
        _row("prefix", "exact prefix", found["prefix"], engine.name, keep, None),
        _row("leyline", "Leyline", found["leyline"], engine.name, keep, GOAL),
    ]


def _row(
    arm: Arm, name: str, results: list[ArmResult], model: str, keep: int, goal: float | None
) -> Row:
    prompt = sum(result.prompt_tokens for result in results)
    cached = sum(result.cached_tokens for result in results)
    turns = [turn for result in results for turn in result.turns]
    return Row(
        f"hitrate.{arm}",
        f"prompt tokens cached, {name}: {len(turns)} calls of {len(results)} recorded sessions, "
        f"newest {keep} tool outputs kept (counted on {model})",
        cached / prompt,
        unit="share",
        at_least=goal,
        details={
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "computed_tokens": prompt - cached,
            "calls": len(turns),
            "edits": sum(turn.edits for turn in turns),
            "fallbacks": sum(turn.fallback is not None for turn in turns),
            "sessions": [result.hit_rate for result in results],
        },
    )

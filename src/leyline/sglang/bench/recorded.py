"""Prompt tokens cached over recorded sessions: SGLang with the plugin, and the embedded engine.

Counts don't depend on weights: a tiny random model serves, with the real tokenizer. Recorded
answers take the place of new ones: a second request puts them behind the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline.bench.hitrate import GOAL, MAX_TOKENS, tiny_engine
from leyline.bench.row import Row
from leyline.replay import Arm, Turn, replay, turns_of
from leyline.sglang.bench.server import Server
from leyline.sglang.cpu import checkpoint as cpu
from leyline.traces import Session

FLAGS = ("--max-total-tokens", str(MAX_TOKENS), "--context-length", str(MAX_TOKENS))
ARMS: dict[Arm, str] = {"prefix": "plain requests", "leyline": "sessions"}


@dataclass(frozen=True, slots=True)
class Call:
    """One model call: its prompt's tokens, and how many were cached here and in the embedded
    engine."""

    prompt: int
    cached: int
    embedded: int
    fallback: str | None


def write_tiny(folder: Path, tokenizer: Any) -> Path:
    """A model that counts right and computes little, as SGLang loads it."""
    return cpu.write_tiny(
        folder,
        "llama",
        tokenizer,
        vocab_size=len(tokenizer),
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        hidden_size=32,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
    )


def run(
    server: Server,
    tokenizer: Any,
    sessions: Sequence[Session],
    keep: int = 2,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """server: of `write_tiny`'s model, page size 1. Its cache is emptied for every session."""
    found: dict[Arm, list[Call]] = {arm: [] for arm in ARMS}
    with tiny_engine(tokenizer) as engine:
        for i, session in enumerate(sessions):
            say(f"session {i + 1} of {len(sessions)}")
            turns = turns_of(tokenizer, session, keep=keep)
            for arm in ARMS:
                engine.reset()
                embedded = replay(engine, turns, arm, session.id).turns
                name = session.id if arm == "leyline" else None
                cached = [turn.cached_tokens for turn in embedded]
                found[arm] += _calls(server, turns, name, cached)
    count = f"{len(found['prefix'])} calls of {len(sessions)} recorded sessions"
    rows = [
        _hit_rate(arm, f"{count}, newest {keep} tool outputs kept, {what}", found[arm])
        for arm, what in ARMS.items()
    ]
    return [*rows, _apart(found["leyline"])]


def _calls(
    server: Server, turns: Sequence[Turn], session: str | None, embedded: Sequence[int]
) -> list[Call]:
    server.flush()
    calls = []
    for turn, beside in zip(turns, embedded, strict=True):
        prompt = turn.prompt.tolist()
        answer = server.generate(prompt, session=session)
        fallback = answer.report["fallback"] if answer.report else None
        calls.append(Call(answer.prompt, answer.cached, beside, fallback))
        server.generate([*prompt, *turn.answer], session=session)
    return calls


def _hit_rate(arm: Arm, what: str, calls: list[Call]) -> Row:
    prompt = sum(call.prompt for call in calls)
    return Row(
        f"recorded.{arm}",
        f"prompt tokens cached, {what}",
        sum(call.cached for call in calls) / prompt,
        unit="share",
        at_least=GOAL if arm == "leyline" else None,
        details={
            "prompt_tokens": prompt,
            "cached_tokens": sum(call.cached for call in calls),
            "embedded": sum(call.embedded for call in calls) / prompt,
            "fallbacks": sum(call.fallback is not None for call in calls),
        },
    )


def _apart(calls: list[Call]) -> Row:
    differences = [abs(call.cached - call.embedded) for call in calls]
    return Row(
        "recorded.embedded",
        "the same beside the embedded engine: most that any call is apart",
        max(differences),
        unit="tokens",
        at_most=1,
        details={"calls_apart": sum(map(bool, differences))},
    )

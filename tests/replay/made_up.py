"""Recorded sessions of random words."""

from __future__ import annotations

import random
from typing import Any

from leyline.traces import Session


def session(seed: int, turns: int = 6, output: int = 40) -> Session:
    """Nothing in it repeats by chance. output: words that a tool answers with."""
    dice = random.Random(seed)
    messages: list[dict[str, Any]] = [{"role": "user", "content": _words(dice, 12)}]
    for _ in range(turns):
        messages.append({"role": "assistant", "content": _words(dice, 8)})
        messages.append({"role": "tool", "content": _words(dice, output)})
    return Session(f"s{seed}", tuple(messages[:-1]), (1.0,) * (turns - 1))


def _words(dice: random.Random, n: int) -> str:
    parts = ("bdfgklmnprst", "aeiou", "nrst")
    return " ".join("".join(dice.choice(part) for part in parts) for _ in range(n))

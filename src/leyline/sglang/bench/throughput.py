"""What the plugin costs requests without a directive: SGLang with it against SGLang alone.

Two servers, one of which is idle at any time; they take turns, so that whatever else the machine
does hits both.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from leyline.bench.row import Row
from leyline.bench.timing import paired, seconds
from leyline.sglang.bench.server import Server

GOAL = 0.98


@dataclass(frozen=True, slots=True)
class Load:
    """clients send `requests` each, one after the other, of `prompt` random tokens."""

    clients: int = 16
    requests: int = 1
    prompt: int = 96
    new: int = 24


def run(
    ours: Server,
    alone: Server,
    load: Load,
    repeats: int,
    vocab_size: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """ours: with the plugin; no session was seen there yet."""
    rng = np.random.default_rng(0)

    def once(server: Server) -> float:
        prompts = rng.integers(0, vocab_size, (load.clients, load.requests, load.prompt))

        def client(mine: np.ndarray) -> None:
            for prompt in mine:
                server.generate(prompt, load.new)

        server.flush()
        with ThreadPoolExecutor(load.clients) as pool:
            return seconds(lambda: list(pool.map(client, prompts)))

    once(ours), once(alone)
    rows = [_measure(ours, alone, once, load, repeats, "before any session", "unused", say)]
    ours.generate(rng.integers(0, vocab_size, load.prompt), session="bench")
    rows.append(_measure(ours, alone, once, load, repeats, "after one", "used", say))
    return rows


def _measure(
    ours: Server,
    alone: Server,
    once: Callable[[Server], float],
    load: Load,
    repeats: int,
    when: str,
    name: str,
    say: Callable[[str], None],
) -> Row:
    pairs = []
    for i in range(repeats):
        say(f"{when}, {i + 1} of {repeats}")
        if i % 2:  # whoever comes first has the colder caches
            other = once(alone)
            pairs.append((other, once(ours)))
        else:
            mine = once(ours)
            pairs.append((once(alone), mine))
    without, with_, ratio = paired(pairs)
    tokens = load.clients * load.requests * (load.prompt + load.new)
    return Row(
        f"throughput.{name}",
        f"throughput of plain requests, plugin on / off, {when}: {load.clients} clients, "
        f"{load.prompt} + {load.new} tokens",
        ratio,
        at_least=GOAL,
        details={
            "tokens_per_s": tokens / with_,
            "tokens_per_s_without": tokens / without,
            "pairs": pairs,
        },
    )

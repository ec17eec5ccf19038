"""An edit made while a tool runs: what the next request still waits for.

As in leyline.bench.ahead. Each pair is of one server: the same edit, one token further on, made
ahead by the session's route or brought along by the request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from leyline.bench.ahead import REPAIRED, times
from leyline.bench.row import Row
from leyline.bench.splice import Sizes, edited
from leyline.sglang.bench.edit import Timed, timed
from leyline.sglang.bench.server import Server

SESSION = "ahead"


def run(
    server: Server,
    tokens: np.ndarray,
    sizes: Sizes,
    repeats: int,
    vocab_size: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Time to the first token, the edit being there already / coming with the request: spliced, and
    with tokens behind it repaired. server: a watched one. Its cache is emptied."""
    server.generate(tokens[-64:])  # the first request sets things up
    rows = []
    ways: dict[str, dict[str, Any]] = {
        "replace": {},
        "repair": {"mode": "repair", "repair": REPAIRED},
    }
    for name, options in ways.items():
        server.flush()
        pairs = []
        source = tokens[: sizes.conversation]
        server.generate(source, session=SESSION)
        for i in range(repeats):
            say(f"{name}, {i + 1} of {repeats}")
            pairs.append(_pair(server, source, sizes, 2 * i, vocab_size, options))
        rows += _rows(pairs, name, sizes, options.get("repair", 0))
    return rows


def _pair(
    server: Server,
    source: np.ndarray,
    sizes: Sizes,
    i: int,
    vocab_size: int,
    options: dict[str, Any],
) -> tuple[Timed, Timed]:
    """With the edit made ahead, and without. Each is undone by another edit."""
    first, second = (edited(source, sizes, sizes.stub, i + k, vocab_size) for k in range(2))
    server.edit(first[: len(first) - sizes.new], SESSION, options)  # while the tool runs
    ahead = timed(server, first, SESSION, options)
    server.generate(source, session=SESSION)
    along = timed(server, second, SESSION, options)
    server.generate(source, session=SESSION)
    return ahead, along


def _rows(pairs: list[tuple[Timed, Timed]], name: str, sizes: Sizes, repaired: int) -> list[Row]:
    seconds = [(ahead.answer.seconds, along.answer.seconds) for ahead, along in pairs]
    computed = [ahead.seen.tokens for ahead, _ in pairs]
    return [
        times(seconds, name, sizes, repaired),
        Row(
            f"ahead.{name}.computed",
            f"tokens prefilled for that request ({sizes.new} new)",
            max(computed),
            unit="tokens",
            at_most=sizes.new,
            details={"ahead": computed, "along": [along.seen.tokens for _, along in pairs]},
        ),
    ]

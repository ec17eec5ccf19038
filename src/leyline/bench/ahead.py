"""An edit made while a tool runs: what the next request still waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from leyline.bench.row import Row
from leyline.bench.splice import Sizes, edited
from leyline.bench.timing import first_token, paired, prefill

if TYPE_CHECKING:
    from leyline.channel import Channel, Report
    from leyline.engine.engine import Engine

REPAIRED = 256


def run(
    engine: Engine,
    tokens: np.ndarray,
    sizes: Sizes,
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Time to the first token, the edit being there already / coming with the request: spliced, and
    with tokens behind it repaired. The engine's cache is emptied."""
    from leyline.channel import Channel
    from leyline.directive import Mode

    rows = []
    for name, channel in (
        ("replace", Channel("bench")),
        ("repair", Channel("bench", mode=Mode.REPAIR, repair=REPAIRED)),
    ):
        say(name)
        engine.reset()
        rows += _run(engine, tokens[: sizes.conversation], sizes, repeats, name, channel)
    return rows


def _run(
    engine: Engine, source: np.ndarray, sizes: Sizes, repeats: int, name: str, channel: Channel
) -> list[Row]:
    """Each splice is undone by another one. Every request edits one token further on."""
    pairs: list[tuple[float, float]] = []
    reports: list[Report] = []
    prefill(engine, source, channel)
    for i in range(0, 2 * repeats, 2):
        first, second = (
            edited(source, sizes, sizes.stub, i + k, engine.vocab_size) for k in range(2)
        )
        prefill(engine, first[: len(first) - sizes.new], channel)  # while the tool runs
        ahead, report = first_token(engine, first, channel)
        prefill(engine, source, channel)
        along, _ = first_token(engine, second, channel)
        prefill(engine, source, channel)
        pairs.append((ahead, along))
        reports.append(report)
    computed = max(report.computed for report in reports)
    return [
        times(pairs, name, sizes, channel.repair),
        Row(
            f"ahead.{name}.computed",
            f"tokens computed by that request ({sizes.new} new)",
            computed,
            unit="tokens",
            at_most=sizes.new,
        ),
    ]


def times(pairs: list[tuple[float, float]], name: str, sizes: Sizes, repaired: int) -> Row:
    """Of seconds to the first token, the edit being there already and coming with the request."""
    ahead_s, along_s, ratio = paired(pairs)
    what = f"{sizes.span} tokens of {sizes.conversation} replaced"
    if repaired:
        what += f", {repaired} behind them repaired"
    return Row(
        f"ahead.{name}",
        f"time to first token, edited while the tool ran / with the request: {what}",
        ratio,
        at_most=1.0,
        details={"ahead_s": ahead_s, "along_s": along_s, "pairs": pairs},
    )

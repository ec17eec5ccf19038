"""Requests with time stamps, and medians."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from leyline.channel import Channel, Report
    from leyline.engine.engine import Engine
    from leyline.engine.request import Request


def seconds(function: Callable[[], Any]) -> float:
    """How long `function` takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def prefill(engine: Engine, tokens: np.ndarray, channel: Channel | None = None) -> Report:
    """Cache a prompt, nothing more."""
    from leyline.engine.request import Sampling

    report = engine.generate(tokens, Sampling(max_tokens=0), channel).report
    assert report is not None
    return report


def first_token(
    engine: Engine, tokens: np.ndarray, channel: Channel | None = None
) -> tuple[float, Report]:
    """Seconds to the first token of a prompt's answer, and the report."""
    from leyline.engine.request import Sampling

    answer = engine.generate(tokens, Sampling(max_tokens=1, ignore_eos=True), channel)
    assert answer.ttft_s is not None and answer.report is not None
    return answer.ttft_s, answer.report


def token_times(engine: Engine, requests: Sequence[Request]) -> list[list[float]]:
    """Run requests at once; for each the times at which its tokens came, taken on the engine's own
    thread. Raises what a request failed with."""
    from leyline.engine.request import Delta, Done, Event, Failed

    times: list[list[float]] = [[] for _ in requests]
    errors: list[Exception] = []
    left = threading.Semaphore(0)

    def taker(mine: list[float]) -> Callable[[Event], None]:
        def take(event: Event) -> None:
            if isinstance(event, Delta) and event.tokens:
                mine.append(time.perf_counter())
            elif isinstance(event, Failed):
                errors.append(event.error)
            if isinstance(event, Done | Failed):
                left.release()

        return take

    for request, mine in zip(requests, times, strict=True):
        engine.submit(request, taker(mine))
    for _ in requests:
        left.acquire()
    if errors:
        raise errors[0]
    return times


def paired(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Medians of both sides, and the median of the ratios first / second, pair by pair: what a busy
    machine does to both halves of a pair cancels out."""
    firsts, seconds_ = zip(*pairs, strict=True)
    return median(firsts), median(seconds_), median(a / b for a, b in pairs)

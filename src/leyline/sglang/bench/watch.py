"""A plugin of SGLang's own, for the benchmark only: counts prefill passes and times attention.

SGLang's `/server_info` gives what was seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

KEY = "leyline_bench"
"""In an internal state of /server_info."""

RUN = "sglang.srt.managers.scheduler.Scheduler.run_batch"
ATTEND = "leyline.sglang.cpu.attention.CpuAttention._run_sdpa_forward_extend"
STATE = (
    "sglang.srt.managers.scheduler_components.internal_state."
    "SchedulerInternalStateController._add_memory_usage"
)


@dataclass(slots=True)
class Seen:
    """passes: of prefill, `tokens` in all. attention_s: seconds of them in attention, which
    includes reading its rows."""

    passes: int = 0
    tokens: int = 0
    attention_s: float = 0.0

    def since(self, before: Seen) -> Seen:
        return Seen(
            self.passes - before.passes,
            self.tokens - before.tokens,
            self.attention_s - before.attention_s,
        )


_seen = Seen()


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(RUN, count_pass, HookType.BEFORE)
    HookRegistry.register(ATTEND, time_attention, HookType.AROUND)
    HookRegistry.register(STATE, add_seen, HookType.AFTER)


def count_pass(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Before `Scheduler.run_batch`."""
    if batch.forward_mode.is_extend():
        _seen.passes += 1
        _seen.tokens += batch.extend_num_tokens


def time_attention(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around one layer's attention of a prefill pass."""
    began = time.perf_counter()
    out = original(*args, **kwargs)
    _seen.attention_s += time.perf_counter() - began
    return out


def add_seen(result: None, controller: Any, state: dict[str, Any]) -> None:
    """After SGLang has begun a description of its state."""
    state[KEY] = asdict(_seen)

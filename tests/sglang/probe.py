"""A plugin of SGLang for tests only: lets them look into the scheduler process.

Does nothing without LEYLINE_SGLANG_DEBUG_DIR. A request with `custom_params={"probe": name}` leaves
its row there, or with `slots` what lies in those, and SGLang's own /server_info says where the
slots are.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

DIR = "LEYLINE_SGLANG_DEBUG_DIR"
RELEASE = "sglang.srt.mem_cache.common.release_kv_cache"
STATE = (
    "sglang.srt.managers.scheduler_components.internal_state."
    "SchedulerInternalStateController._add_memory_usage"
)


def activate() -> None:
    if not os.environ.get(DIR):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(RELEASE, save_rows, HookType.BEFORE)
    HookRegistry.register(STATE, add_slots, HookType.AFTER)


def save_rows(req: Any, tree_cache: Any, **options: Any) -> None:
    """Before a request's row is let go of."""
    import torch

    custom = getattr(req.sampling_params, "custom_params", None) or {}
    name = custom.get("probe")
    if not name or not req.finished() or not req.kv.holds_kv:
        return
    n = req.owned_kv_len()
    row = tree_cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :n].to(torch.int64)
    if "slots" in custom:
        row = torch.tensor(custom["slots"], dtype=torch.int64)
    pool = tree_cache.token_to_kv_pool_allocator.get_kvcache()
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    folder = Path(os.environ[DIR])
    torch.save(
        {
            "ids": [*req.origin_input_ids, *req.output_ids][:n],
            "slots": row.clone(),
            "keys": [pool.get_key_buffer(layer)[row] for layer in layers],
            "values": [pool.get_value_buffer(layer)[row] for layer in layers],
        },
        folder / f"{name}.part",
    )
    (folder / f"{name}.part").rename(folder / f"{name}.pt")


def add_slots(result: None, controller: Any, state: dict[str, Any]) -> None:
    """Where SGLang's own check for leaks looks for the slots."""
    checker = controller.scheduler.invariant_checker
    stats = checker.pool_stats_observer.get_pool_stats()
    state["slots"] = {
        "total": checker.max_total_num_tokens,
        "available": stats.full_available_size,
        "evictable": stats.full_evictable_size,
        "protected": checker.tree_cache.protected_size(),
        "uncached": checker._get_total_uncached_sizes()[0],
    }

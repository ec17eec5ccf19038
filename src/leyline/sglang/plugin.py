"""What SGLang calls at start, in every process: the cache backend and all hooks.

Nothing happens to a server that was not started with `--radix-cache-backend leyline`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from leyline.sglang import versions
from leyline.sglang.arrival import on_arrival
from leyline.sglang.report import is_request_level

log = logging.getLogger("sglang.leyline")

BACKEND = "leyline"


def activate() -> None:
    """Entry point in the group `sglang.srt.plugins`.

    An SGLang that the plugin doesn't know is left alone, but refuses the backend when it is asked
    for.
    """
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    try:
        versions.check_version()
        _register_hooks()
    except versions.Unready as error:
        register_radix_cache_backend(BACKEND, _refusing(error))
        return
    register_radix_cache_backend(BACKEND, make_cache)


def make_cache(ctx: Any) -> Any:
    """The cache of one scheduler. Raises Unready, one sentence, where it can't be."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    from leyline.rope import Unsupported
    from leyline.sglang.refuse import refuse

    versions.check_names()
    versions.check_hooks(versions.SCHEDULER_HOOKS)
    refuse(ctx)
    from leyline.sglang.cache import LeylineRadixCache
    from leyline.sglang.report import Metrics
    from leyline.sglang.rows import Rows

    runner = ctx.tp_worker.model_runner
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    try:
        rows = Rows.of(
            pool,
            runner.model,
            stream=getattr(runner, "forward_stream", None),
            positions=ctx.model_config.context_len,
        )
    except Unsupported as error:
        raise versions.Unready(
            f"--radix-cache-backend leyline can't be used here: {error.message}"
        ) from error
    cache = create_unified_radix_cache(ctx, cache_class=LeylineRadixCache)
    metrics = Metrics(bool(ctx.params.enable_metrics), _labels(ctx))
    cache.attach(rows, metrics, ctx.model_config.vocab_size)
    log.info("Leyline: %s", rows)
    return cache


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    create, adder, request_level = versions.SCHEDULER_HOOKS
    HookRegistry.register(create, on_arrival, HookType.AFTER)
    HookRegistry.register(adder, _adder_class, HookType.AFTER)
    HookRegistry.register(request_level, is_request_level, HookType.AFTER)


def _adder_class(base: Any, scheduler: Any) -> Any:
    from leyline.sglang.admission import adder_class

    return adder_class(base, scheduler)


def _labels(ctx: Any) -> dict[str, str]:
    return {
        "model_name": str(ctx.server_args.served_model_name or ctx.server_args.model_path),
        "tp_rank": str(ctx.tp_rank),
    }


def _refusing(error: versions.Unready) -> Any:
    def refuse(ctx: Any) -> Any:
        raise error

    return refuse

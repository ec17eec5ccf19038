"""What SGLang calls at start, in every process: the cache backend and all hooks.

Nothing happens to a server that was not started with `--radix-cache-backend leyline`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from leyline.sglang import versions
from leyline.sglang.arrival import on_arrival
from leyline.sglang.carriers import BACKEND, is_enabled
from leyline.sglang.report import is_request_level
from leyline.sglang.session_control import on_control

log = logging.getLogger("sglang.leyline")


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
    overlap = not ctx.server_args.disable_overlap_schedule  # else all is on the current stream
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    try:
        rows = Rows.of(
            pool,
            runner.model,
            stream=getattr(runner, "forward_stream", None) if overlap else None,
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
    """The same in every process: which of them takes requests is not to be told from inside."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from leyline.sglang import request

    *after, control = versions.SCHEDULER_HOOKS
    hooks: list[tuple[Sequence[str], tuple[Any, ...], HookType]] = [
        (after, (on_arrival, _adder_class, is_request_level), HookType.AFTER),
        ((control,), (on_control,), HookType.AROUND),
        (
            versions.TOKENIZER_HOOKS,
            (
                request.generate_request,
                request.update_request_meta_info,
                request.handle_abort_finish_reason,
            ),
            HookType.AROUND,
        ),
        (versions.HTTP_HOOKS, (before_http,), HookType.BEFORE),
    ]
    for targets, functions, kind in hooks:
        for target, function in zip(targets, functions, strict=True):
            HookRegistry.register(target, function, kind)


def before_http(*args: Any, **kwargs: Any) -> None:
    """Before `http_server._setup_and_run_http_server`. Raises Unready if requests would get past
    the plugin."""
    from leyline.sglang import http, session_routes

    if is_enabled():
        versions.check_hooks(versions.TOKENIZER_HOOKS)
    http.add_middleware()
    session_routes.add_routes()


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

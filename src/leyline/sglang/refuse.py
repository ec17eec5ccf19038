"""What a server can't have together with Leyline, each with one sentence."""

from __future__ import annotations

from typing import Any

from leyline.sglang.versions import Unready


def refuse(ctx: Any) -> None:
    """Raises Unready, naming everything that stands in the way. ctx: SGLang's
    `TreeCacheBuildContext`."""
    found = [sentence for sentence, there in _reasons(ctx) if there]
    if found:
        raise Unready("--radix-cache-backend leyline can't be used here: " + "; ".join(found))


def _reasons(ctx: Any) -> list[tuple[str, bool]]:
    args = ctx.server_args

    def on(name: str) -> bool:
        return bool(getattr(args, name, False))

    return [
        ("--disable-radix-cache leaves no cache to edit", ctx.disable_radix_cache),
        ("HiCache (--enable-hierarchical-cache) keeps rows on the host", _hicache(ctx)),
        ("LMCache and other external caches keep rows elsewhere", _external(args)),
        (
            "prefill-decode disaggregation (--disaggregation-mode) sends rows away",
            getattr(args, "disaggregation_mode", "null") not in ("null", None),
        ),
        ("speculative decoding keeps a second cache", _speculative(ctx)),
        ("sparse attention (DSA) keeps an index beside its rows", ctx.is_dsa),
        ("sliding windows drop rows", ctx.is_hybrid_swa),
        ("recurrent layers (Mamba and the like) keep a state, not rows", ctx.is_hybrid_ssm),
        ("pipeline parallelism (--pp-size) splits a row", getattr(args, "pp_size", 1) > 1),
        ("context parallelism (DCP) splits a row", getattr(args, "dcp_size", 1) > 1),
        ("KV sharding splits a row", on("enable_kv_cache_sharding") or _sharded(ctx)),
        ("diffusion models revise their rows", bool(getattr(args, "dllm_algorithm", None))),
        ("streaming sessions keep rows out of the cache", on("enable_streaming_session")),
        ("--enable-session-radix-cache is another way to keep sessions", _radix_sessions(args)),
        (
            "--tokenizer-worker-num above 1 starts HTTP workers that load no plugins",
            getattr(args, "tokenizer_worker_num", 1) > 1,
        ),
        ("SGLANG_RUST_SERVER takes requests past the plugin", _rust_server()),
        ("multimodal models give a token several positions", _multimodal(ctx)),
    ]


def _hicache(ctx: Any) -> bool:
    return bool(ctx.enable_hierarchical_cache)


def _external(args: Any) -> bool:
    names = ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
    return any(getattr(args, name, False) for name in names)


def _speculative(ctx: Any) -> bool:
    return bool(ctx.params.is_eagle or getattr(ctx.server_args, "speculative_algorithm", None))


def _radix_sessions(args: Any) -> bool:
    return bool(getattr(args, "enable_session_radix_cache", False))


def _sharded(ctx: Any) -> bool:
    from sglang.srt.mem_cache.allocator.page_interleave import page_interleave_shard_size

    return bool(page_interleave_shard_size(ctx.params.token_to_kv_pool_allocator) > 1)


def _rust_server() -> bool:
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_RUST_SERVER.get())


def _multimodal(ctx: Any) -> bool:
    return bool(getattr(ctx.model_config, "is_multimodal", False))

"""The SGLang versions that this plugin was written for, and what it relies on in them.

SGLang only logs a plugin that fails, and then serves without it. So the names are checked when the
plugin is loaded, the hooks when the cache is built, and a server that was started with
`--radix-cache-backend leyline` refuses to start otherwise.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version

SUPPORTED = ("0.5.23",)

SCHEDULER_HOOKS = (
    "sglang.srt.managers.scheduler.Scheduler._create_generation_req",
    "sglang.srt.managers.scheduler.Scheduler.get_prefill_adder_class",
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
    ".is_request_level_customized_info_key",
    "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control",
)
"""Hooked in the scheduler's process."""

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
TOKENIZER_HOOKS = (
    f"{_MANAGER}.generate_request",
    f"{_MANAGER}.update_request_meta_info",
    f"{_MANAGER}._handle_abort_finish_reason",
)
"""Hooked in the process that takes requests: the HTTP server's, or an offline Engine's."""

HTTP_HOOKS = ("sglang.srt.entrypoints.http_server._setup_and_run_http_server",)
"""Hooked in the HTTP server's process."""

_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_IO = "sglang.srt.managers.io_struct"
ROUTES_RELY_ON = (
    f"{_MANAGER}.dumper_control",
    f"{_IO}.DumperControlReqInput",
    f"{_IO}.DumperControlReqOutput",
    f"{_IO}.AbortReq",
    "sglang.srt.managers.scheduler.Scheduler.abort_request",
    "sglang.srt.managers.scheduler.Scheduler.collect_inflight_reqs",
    "sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingTokenize._tokenize_chat_request",
    "sglang.srt.entrypoints.openai.protocol.TokenizeRequest",
    *(f"{_CHAT}.{name}" for name in (
        "extract_routed_dp_rank_from_header", "extract_routing_key", "_resolve_lora_path",
    )),
)  # fmt: skip
"""By the session routes, in both processes."""

_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
RELIED_ON = (
    *(f"{_CACHE}.{name}" for name in (
        "match_prefix", "_match_tree", "init_load_back", "load_back_is_cache_owned",
        "prefix_device_indices", "path_device_indices", "checkpoint", "checkpoint_into_tree",
        "insert", "claim_kv_row", "on_release", "reset", "lock", "unlock",
        "_apply_eviction_result",
    )),
    *(f"{_CORE}.{name}" for name in (
        "evict_device_leaf", "collect_path_info", "collect_full_device_indices",
    )),
    *(f"{_ADDER}.{name}" for name in (
        "_select_prefill_admission", "_commit_prefill_admission", "add_chunked_req",
    )),
    "sglang.srt.managers.schedule_policy._PrefillAdmission",
    "sglang.srt.mem_cache.prefill_budget.PrefillBudget.reserve",
    "sglang.srt.mem_cache.allocation.alloc_token_slots",
    "sglang.srt.mem_cache.allocation.alloc_paged_token_slots_extend",
    "sglang.srt.mem_cache.common.evict_from_tree_cache",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
    "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort",
    *TOKENIZER_HOOKS,
    *ROUTES_RELY_ON,
)  # fmt: skip


class Unready(RuntimeError):
    """The plugin can't work in this SGLang; the message is one sentence."""


def check_version(installed: str | None = None) -> None:
    """Raises Unready for an SGLang that the plugin was not written for."""
    installed = installed or version("sglang")
    if installed not in SUPPORTED:
        raise Unready(
            f"leyline works with SGLang {', '.join(SUPPORTED)}, but {installed} is installed: "
            f"pip install sglang=={SUPPORTED[-1]}"
        )


def check_names(names: tuple[str, ...] = RELIED_ON) -> None:
    """Raises Unready if SGLang lacks something that the plugin relies on."""
    missing = [name for name in names if not _exists(name)]
    if missing:
        raise Unready(
            f"leyline relies on {', '.join(missing)}, which this SGLang {version('sglang')} lacks; "
            "is it patched or a nightly build?"
        )


def check_hooks(names: tuple[str, ...]) -> None:
    """Raises Unready if SGLang did not put the plugin's hooks in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [name for name in names if name not in HookRegistry._patched]
    if missing:
        raise Unready(
            f"leyline's hooks are not in place ({', '.join(missing)}): "
            "the log says why; a wrong SGLANG_PLUGINS keeps the plugin out"
        )


def _exists(name: str) -> bool:
    module, _, rest = name.partition(".srt.")
    parts = f"{module}.srt.{rest}".split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False

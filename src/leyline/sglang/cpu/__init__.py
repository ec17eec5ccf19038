"""What it takes to run SGLang on a CPU: for tests, for CI and for a look at it on a laptop.

`python -m leyline.sglang.cpu MODEL` starts a server. Nothing of SGLang is patched: a stand-in for
its compiled kernels comes first on the path, and an entry point registers two things under the name
of its own backend `torch_native`, an attention that is fast enough and the way that MLA takes.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyline.sglang.cpu.attention import CpuAttention

BACKEND = "torch_native"
ENGINE = "SGLANG_USE_CPU_ENGINE"
ATTENTION = "LEYLINE_CPU_ATTENTION"
FORK = "LEYLINE_CPU_FORK"


def prepare() -> None:
    """Entry point `sglang.srt.plugins: leyline_cpu`. Does nothing unless SGLang runs on a CPU.

    LEYLINE_CPU_ATTENTION=sglang leaves SGLang's own attention in. LEYLINE_CPU_FORK=1 forks SGLang's
    processes instead of starting each from nothing: a server is up in half the time.
    """
    if os.environ.get(ENGINE) != "1":
        return
    _mla_on_latents()
    if os.environ.get(ATTENTION, "") != "sglang":
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(BACKEND)(_attention)
    if os.environ.get(FORK) == "1":
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork)


def _attention(runner: Any) -> CpuAttention:
    from leyline.sglang.cpu.attention import CpuAttention

    return CpuAttention(runner)


def _mla_on_latents() -> None:
    """MLA on the latent rows themselves: SGLang's torch code knows no other way on a CPU."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register(
        BACKEND, lambda attention, batch: handler.AttnForwardMethod.MLA
    )


def _fork(result: None, *args: Any, **options: Any) -> None:
    """After SGLang has chosen how its processes begin."""
    multiprocessing.set_start_method("fork", force=True)

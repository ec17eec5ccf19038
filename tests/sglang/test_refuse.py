"""What can't be together with Leyline is refused at start, with one sentence that says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Server
from sglang.srt.server_args import ServerArgs

from leyline.sglang import versions
from leyline.sglang.refuse import refuse

STARTS = {
    "no radix cache": (["--disable-radix-cache"], "--disable-radix-cache leaves no cache"),
    "HiCache": (["--enable-hierarchical-cache", "--hicache-size", "1"], "HiCache"),
    "streaming sessions": (["--enable-streaming-session"], "streaming sessions keep rows"),
    "radix sessions": (["--enable-session-radix-cache"], "another way to keep sessions"),
    "tokenizer workers": (["--tokenizer-worker-num", "2"], "HTTP workers that load no plugins"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STARTS)
def test_refused_at_start(case: str, checkpoint: Callable[..., Path]) -> None:
    flags, sentence = STARTS[case]
    with pytest.raises(RuntimeError) as error:
        Server(checkpoint("gqa"), *flags).start()
    log = str(error.value)
    found = re.search(r"leyline\.sglang\.versions\.Unready: (.*)", log)
    assert found and sentence in found[1], log[-3000:]
    assert "\n" not in found[1]


def context(**changes: Any) -> SimpleNamespace:
    """What SGLang gives a cache to be built from, where nothing stands in the way."""
    allocator = SimpleNamespace(page_size=1)
    plain: dict[str, Any] = dict(
        server_args=ServerArgs(model_path="none", **changes.pop("args", {})),
        params=SimpleNamespace(is_eagle=False, token_to_kv_pool_allocator=allocator),
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
        enable_hierarchical_cache=False,
        disable_radix_cache=False,
        is_dsa=False,
        model_config=SimpleNamespace(is_multimodal=False),
    )
    return SimpleNamespace(**(plain | changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(is_dsa=True), "sparse attention"),
        (dict(args=dict(speculative_algorithm="NGRAM")), "speculative decoding"),
        (dict(is_hybrid_swa=True), "sliding windows"),
        (dict(is_hybrid_ssm=True), "recurrent layers"),
        (dict(model_config=SimpleNamespace(is_multimodal=True)), "multimodal"),
        (dict(args=dict(disaggregation_mode="prefill")), "disaggregation"),
        (dict(args=dict(pp_size=2)), "pipeline parallelism"),
        (dict(args=dict(dcp_size=2)), "context parallelism"),
        (dict(args=dict(enable_kv_cache_sharding=True)), "KV sharding"),
        (dict(args=dict(dllm_algorithm="LowConfidence")), "diffusion"),
        (dict(args=dict(enable_lmcache=True)), "LMCache"),
        (dict(args=dict(enable_flexkv=True)), "external caches"),
        (dict(args=dict(enable_unified_cache_external_linker=True)), "external caches"),
    ],
)
def test_refused_without_a_start(changes: dict[str, Any], sentence: str) -> None:
    """For what doesn't start on a CPU anyway; the arguments are SGLang's own."""
    with pytest.raises(versions.Unready, match=sentence):
        refuse(context(**changes))


def test_nothing_refused() -> None:
    refuse(context())


def test_rust_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(versions.Unready, match="SGLANG_RUST_SERVER"):
        refuse(context())


def test_all_reasons_at_once() -> None:
    with pytest.raises(versions.Unready) as error:
        refuse(context(is_dsa=True, disable_radix_cache=True))
    assert "DSA" in str(error.value) and "--disable-radix-cache" in str(error.value)


def test_version() -> None:
    versions.check_version()
    with pytest.raises(versions.Unready, match=r"but 0\.5\.22 is installed: pip install sglang=="):
        versions.check_version("0.5.22")


def test_names_are_there() -> None:
    versions.check_names()


@pytest.mark.parametrize(
    "name",
    [
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.no_such_method",
        "sglang.srt.mem_cache.no_such_module.anything",
    ],
)
def test_missing_name(name: str) -> None:
    with pytest.raises(versions.Unready, match=re.escape(name)):
        versions.check_names((name,))


def test_hooks_not_in_place() -> None:
    with pytest.raises(versions.Unready, match="SGLANG_PLUGINS"):
        versions.check_hooks(("sglang.srt.managers.scheduler.Scheduler.get_prefill_adder_class",))

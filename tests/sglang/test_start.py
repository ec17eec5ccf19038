"""A server on the CPU: it starts, answers, caches, is looked into, and its attention is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import Server
from transformers import AutoModelForCausalLM

from leyline.sglang.cpu.__main__ import command, environment

pytestmark = pytest.mark.sglang


def tokens(n: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(4, 500) for _ in range(n)]


# --- the command line, without a server -----------------------------------------------------------


def test_given_flags_replace_defaults() -> None:
    line = command(["m", "--device=cuda", "--max-total-tokens", "100", "--tp", "2"])
    assert line[line.index("--model-path") + 1] == "m"
    assert "--device" not in line and line.count("--max-total-tokens") == 1
    assert line[-5:] == ["--device=cuda", "--max-total-tokens", "100", "--tp", "2"]
    assert line[line.index("--radix-cache-backend") + 1] == "leyline"
    plain = command(["m", "--plain"])
    assert "--radix-cache-backend" not in plain and "--plain" not in plain


@pytest.mark.parametrize(
    ("plugins", "plain", "want"),
    [
        (None, False, None),  # all that are installed
        ("other", False, "leyline,leyline_cpu,other"),
        (None, True, "leyline_cpu"),
        ("leyline,other", True, "leyline_cpu,other"),
    ],
)
def test_which_plugins_are_loaded(plugins: str | None, plain: bool, want: str | None) -> None:
    outer = {} if plugins is None else {"SGLANG_PLUGINS": plugins}
    env = environment({**outer, "PYTHONPATH": "/mine", "OMP_WAIT_POLICY": "ACTIVE"}, plain=plain)
    assert env.get("SGLANG_PLUGINS") == want
    stand_in, mine = env["PYTHONPATH"].split(":")
    assert (Path(stand_in) / "sgl_kernel" / "__init__.py").is_file() and mine == "/mine"
    assert env["OMP_WAIT_POLICY"] == "ACTIVE"  # what is set stays


# --- attention, without a server ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "values"), [(4, 2, 64, 64), (4, 4, 32, 32), (4, 1, 576, 512)]
)
def test_attention_is_that_of_sglang(
    heads: int, kv_heads: int, width: int, values: int, dtype: torch.dtype
) -> None:
    """Random batches: prefill with and without a cached prefix, over a block's end; decoding."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from leyline.sglang.cpu.attention import BLOCK, CpuAttention

    torch.manual_seed(0)
    prefix, new = [0, 37, 700, 5], [BLOCK + 9, 12, 1, 2 * BLOCK]
    lens = [a + b for a, b in zip(prefix, new, strict=True)]
    slots = torch.randperm(sum(lens))
    table = torch.zeros(len(lens), max(lens), dtype=torch.int64)
    for row, (length, part) in enumerate(zip(lens, slots.split(lens), strict=True)):
        table[row, :length] = part
    k_cache = torch.randn(sum(lens), kv_heads, width, dtype=dtype)
    mla = width != values
    v_cache = k_cache[..., :values] if mla else torch.randn_like(k_cache)
    options: dict[str, Any] = dict(scaling=0.1, enable_gqa=heads != kv_heads)
    rows = torch.arange(len(lens))

    def extend(backend: Any, to: torch.dtype) -> torch.Tensor:
        query, k, v = extend_query.to(to), k_cache.to(to), v_cache.to(to)
        v = k[..., :values] if mla else v
        out = torch.empty(sum(new), heads, values, dtype=to)
        lengths = torch.tensor(lens), torch.tensor(prefix), torch.tensor(new)
        backend._run_sdpa_forward_extend(
            SimpleNamespace(), query, out, k, v, table, rows, *lengths, causal=True, **options
        )
        return out

    def decode(backend: Any, to: torch.dtype) -> torch.Tensor:
        query, k, v = decode_query.to(to), k_cache.to(to), v_cache.to(to)
        v = k[..., :values] if mla else v
        out = torch.empty(len(lens), heads, values, dtype=to)
        backend._run_sdpa_forward_decode(
            SimpleNamespace(), query, out, k, v, table, rows, torch.tensor(lens), **options
        )
        return out

    extend_query = torch.randn(sum(new), heads, width, dtype=dtype)
    decode_query = torch.randn(len(lens), heads, width, dtype=dtype)
    for attend in (extend, decode):
        ours, theirs = attend(CpuAttention, dtype), attend(TorchNativeAttnBackend, dtype)
        truth = attend(TorchNativeAttnBackend, torch.float64)
        off, off_theirs = (ours - truth).abs().max(), (theirs - truth).abs().max()
        assert off <= max(2 * off_theirs, 1e-6 if dtype == torch.float32 else 4e-3)


def test_a_window_is_left_to_sglang() -> None:
    from leyline.sglang.cpu.attention import _special

    assert _special(None, {"sliding_window_size": 0})
    assert not _special(None, {"sliding_window_size": -1})
    assert _special(torch.tensor([1]), {})


# --- a real server --------------------------------------------------------------------------------


def test_a_repeated_prompt_is_cached(server: Server) -> None:
    server.flush()
    prompt = tokens(200, 1)
    first, second = server.generate(prompt, 8), server.generate(prompt, 8)
    assert first.cached == 0 and second.cached == len(prompt) - 1
    assert first.ids == second.ids and len(set(first.ids)) > 1


def test_slots_add_up_and_rows_are_seen(server: Server) -> None:
    """I7, and that the tests' own window into the scheduler shows what is there."""
    server.flush()
    empty = server.slots()
    assert empty.add_up and empty.available == empty.total
    prompt = tokens(100, 2)
    answer = server.generate(prompt, 5, probe="seen")
    rows = server.rows("seen")
    assert rows.ids == (prompt + answer.ids)[:-1]  # the last token has no row yet
    assert len(set(rows.slots.tolist())) == len(rows.ids) == 104
    assert rows.keys[0].shape == (104, 1, 576) and len(rows.keys) == 4
    after = server.slots()
    assert after.add_up and after.evictable == 104


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_without_the_plugin(kind: str, checkpoint: Callable[..., Path]) -> None:
    """The CPU part works alone, and answers as Transformers does. One of the two is started as
    SGLang does it outside of tests, each process from nothing."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint(kind))
    with Server(checkpoint(kind), plugin=False, fork=kind == "mla") as server:
        prompt = tokens(700, 3)
        want = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 700:]
        first = server.generate(prompt, 8, return_logprob=True)
        assert first.ids == want.tolist() and first.cached == 0
        likely = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[first.ids[0]]
        assert first.logprobs[0] == pytest.approx(likely.item(), abs=1e-3)
        second = server.generate(prompt, 8)
        assert second.ids == first.ids and second.cached == 699
        assert "impl=UnifiedRadixCache" in server.log()
        assert server.slots().add_up

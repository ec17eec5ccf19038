"""Rows that SGLang itself writes, for tiny random models of many architectures.

A process of its own: `python real_rows.py OUT` writes a line of JSON for each. A prompt of one
repeated token tells all about a model's positions: whatever attention weighs, it reads the same
values everywhere, so hidden states don't depend on the position, and neither does a key, but for
its turn. In every layer the key at p + d must therefore be R(d) of the key at p.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ["SGLANG_PLUGINS"] = "none"

import torch

from leyline.rope import Unsupported
from leyline.rotate import rotate_reference

TOKENS = 60
SHIFTS = (1, 7, 33)

_BASE = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    layer_norm_eps=1e-5,
    hidden_act="silu",
    rope_theta=10000.0,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    tie_word_embeddings=False,
    torch_dtype="float32",
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_YARN = dict(
    rope_type="yarn",
    factor=4.0,
    beta_fast=32,
    beta_slow=1,
    mscale=0.707,
    mscale_all_dim=0.5,
    original_max_position_embeddings=128,
)
_LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_LATENT = dict(
    kv_lora_rank=64,
    q_lora_rank=None,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    num_key_value_heads=4,
    n_routed_experts=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    n_group=1,
    topk_group=1,
    topk_method="greedy",
    scoring_func="softmax",
    routed_scaling_factor=1.0,
    norm_topk_prob=False,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)


def _model(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return _BASE | dict(architectures=[architecture], model_type=model_type) | changes


TURNS = {  # how rows of each must be told: rotary columns, interleaved
    "apertus": (_model("ApertusForCausalLM", "apertus", hidden_act="xielu"), 16, False),
    "arcee": (_model("ArceeForCausalLM", "arcee", hidden_act="relu2"), 16, False),
    "deepseek_v2": (
        _model("DeepseekV2ForCausalLM", "deepseek_v2", rope_scaling=_YARN, **_LATENT),
        16,
        True,
    ),
    "deepseek_v3": (
        _model(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            rope_scaling=_YARN,
            **_LATENT | dict(q_lora_rank=32, topk_method="noaux_tc", scoring_func="sigmoid"),
        ),
        16,
        True,
    ),
    "gemma": (
        _model(
            "GemmaForCausalLM",
            "gemma",
            head_dim=16,
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        ),
        16,
        False,
    ),
    "glm4": (_model("Glm4ForCausalLM", "glm4", head_dim=16, partial_rotary_factor=0.5), 8, True),
    "glm4_moe": (
        _model(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            head_dim=16,
            partial_rotary_factor=0.5,
            use_qk_norm=True,
            **_LATENT | dict(num_key_value_heads=2),
        ),
        8,
        False,
    ),
    "granite": (_model("GraniteForCausalLM", "granite", attention_multiplier=0.25), 16, False),
    "granitemoe": (
        _model("GraniteMoeForCausalLM", "granitemoe", num_local_experts=4, num_experts_per_tok=2),
        16,
        False,
    ),
    "llama": (_model("LlamaForCausalLM", "llama"), 16, False),
    "llama, llama3": (_model("LlamaForCausalLM", "llama", rope_scaling=_LLAMA3), 16, False),
    "llama, linear": (
        _model("LlamaForCausalLM", "llama", rope_scaling=dict(rope_type="linear", factor=4.0)),
        16,
        False,
    ),
    "llama, YaRN": (_model("LlamaForCausalLM", "llama", rope_scaling=_YARN), 16, False),
    "minimax_m2": (
        _model(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            head_dim=16,
            rotary_dim=8,
            use_qk_norm=False,  # needs a GPU
            num_local_experts=4,
            num_experts_per_tok=2,
            scoring_func="sigmoid",
        ),
        8,
        False,
    ),
    "mistral": (_model("MistralForCausalLM", "mistral", head_dim=16), 16, False),
    "mixtral": (
        _model("MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2),
        16,
        False,
    ),
    "olmo": (_model("OlmoForCausalLM", "olmo", clip_qkv=None, num_key_value_heads=4), 16, False),
    "olmo2": (_model("Olmo2ForCausalLM", "olmo2"), 16, False),
    "olmoe": (_model("OlmoeForCausalLM", "olmoe", num_key_value_heads=4, **_EXPERTS), 16, False),
    "phi": (
        _model(
            "PhiForCausalLM",
            "phi",
            partial_rotary_factor=0.5,
            hidden_act="gelu_new",
            num_key_value_heads=4,
        ),
        8,
        False,
    ),
    "ministral3": (
        _model(
            "Ministral3ForCausalLM",
            "ministral3",
            head_dim=16,
            rope_parameters=_YARN | dict(rope_theta=10000.0, llama_4_scaling_beta=0.1),
        ),
        16,
        False,
    ),
    "phimoe": (
        _model("PhiMoEForCausalLM", "phimoe", num_local_experts=4, num_experts_per_tok=2),
        16,
        False,
    ),
    "persimmon": (
        _model(
            "PersimmonForCausalLM",
            "persimmon",
            partial_rotary_factor=0.5,
            num_key_value_heads=4,
            hidden_act="relu2",
            qk_layernorm=True,
        ),
        8,
        False,
    ),
    "phi3": (_model("Phi3ForCausalLM", "phi3"), 16, False),
    "hunyuan_v3": (
        _model(
            "HYV3ForCausalLM",
            "hy_v3",
            head_dim=16,
            qk_norm=True,
            route_norm=True,
            num_shared_experts=1,
            **_EXPERTS,
        ),
        16,
        False,
    ),
    "exaone": (_model("ExaoneForCausalLM", "exaone"), 16, False),
    "qwen2": (_model("Qwen2ForCausalLM", "qwen2"), 16, False),
    "qwen2_moe": (
        _model(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            shared_expert_intermediate_size=0,
            decoder_sparse_step=1,
            **_EXPERTS,
        ),
        16,
        False,
    ),
    "qwen3": (_model("Qwen3ForCausalLM", "qwen3", head_dim=16), 16, False),
    "qwen3_moe": (
        _model("Qwen3MoeForCausalLM", "qwen3_moe", head_dim=16, norm_topk_prob=True, **_EXPERTS),
        16,
        False,
    ),
    "stablelm": (_model("StableLmForCausalLM", "stablelm", partial_rotary_factor=0.25), 4, False),
    "starcoder2": (
        _model(
            "Starcoder2ForCausalLM",
            "starcoder2",
            hidden_act="gelu_pytorch_tanh",
            norm_epsilon=1e-5,
            use_bias=True,
            tie_word_embeddings=True,
        ),
        16,
        False,
    ),
}
REFUSED = {  # what the refusal speaks of
    "hunyuan": (  # norms its keys after the turn
        _model("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", head_dim=16, use_qk_norm=True),
        "HunYuanAttention",
    ),
    "cohere2": (  # leaves every fourth layer without positions, though it has a rotary module
        _model(
            "Cohere2ForCausalLM",
            "cohere2",
            sliding_window=64,
            logit_scale=1.0,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        "CohereAttention",
    ),
    "gpt2": (  # adds positions to the input
        _model("GPT2LMHeadModel", "gpt2", n_positions=512, n_ctx=512),
        "GPT2Attention",
    ),
}


@dataclass
class Finding:
    """What came of one model. errors: per layer, the largest difference between a key and the
    turned one, over the largest key; copied: the same for rows that `Rows.copy` put elsewhere."""

    name: str
    modules: tuple[str, ...] = ()
    refused: str = ""
    width: int = 0
    interleaved: bool = False
    errors: tuple[float, ...] = ()
    unturned: float = 0.0
    copied: float = 0.0
    values_equal: bool = True
    failed: str = ""


def look_at(work: tuple[str, dict[str, Any]]) -> Finding:
    """In a process of its own: SGLang keeps one model a process."""
    name, config = work
    finding = Finding(name)
    try:
        _look(finding, config)
    except Exception as error:
        traceback.print_exc()
        finding.failed = repr(error)
    return finding


def _look(finding: Finding, config: dict[str, Any]) -> None:
    from leyline.sglang.rows import Rows

    torch.set_num_threads(1)
    runner = _runner(config)
    generator = torch.Generator().manual_seed(1)
    for weights in runner.model.parameters():  # SGLang's dummy weights are too small to tell apart
        spread = 0.3 if weights.dim() > 1 else 0.1
        weights.data.copy_(torch.randn(weights.shape, generator=generator) * spread)
        if weights.dim() == 1:
            weights.data += 1
    finding.modules = tuple(
        {f"{type(m).__module__}.{type(m).__qualname__}" for m in runner.model.modules()}
    )
    pool = runner.token_to_kv_pool_allocator.get_kvcache()
    try:
        rows = Rows.of(pool, runner.model, positions=runner.model_config.context_len)
    except Unsupported as error:
        finding.refused = error.message
        return
    finding.width, finding.interleaved = rows.rope.width, rows.rope.interleaved
    slots = _prefill(runner, [7] * TOKENS)
    source = rows.read(slots)
    for keys, *_ in source:
        exact, largest = keys.double(), float(keys.abs().max())
        errors = [
            (rotate_reference(exact[:-d], d, rows.rope, rows.start) - exact[d:]).abs().max()
            for d in SHIFTS
        ]
        finding.errors += (float(torch.stack(errors).max()) / largest,)
        finding.unturned = max(
            finding.unturned, float((exact[33:] - exact[:-33]).abs().max()) / largest
        )
    spare = torch.arange(200, 200 + TOKENS - 33)
    rows.copy(slots[: len(spare)], spare, [(len(spare), 33)])
    for old, new in zip(source, rows.read(spare), strict=True):
        worst = (new[0].double() - old[0][33:].double()).abs().max() / old[0].abs().max()
        finding.copied = max(finding.copied, float(worst))
        finding.values_equal &= all(
            torch.equal(mine, theirs[: len(spare)])
            for mine, theirs in zip(new[1:], old[1:], strict=True)
        )


def _runner(config: dict[str, Any]) -> Any:
    """SGLang's model runner for a config, on the CPU."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    from leyline.sglang import cpu

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        attention_backend=cpu.BACKEND,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_total_tokens=300,
        mem_fraction_static=0.2,
    )
    args.resolve_once()
    ranks = one_batch.SpawnRanks(
        world_rank=one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0
    )
    one_batch.publish(args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    cpu._mla_on_latents()
    one_batch.get_tokenizer = lambda *args, **options: None
    runner, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    return runner.torch_runner


def _prefill(runner: Any, tokens: list[int]) -> torch.Tensor:
    """The slots of a prompt's rows, after SGLang has prefilled it."""
    from sglang.benchmark import one_batch

    request = one_batch.prepare_synthetic_inputs_for_latency_test(1, 0, [tokens])
    one_batch.extend(request, runner)
    table = runner.req_to_token_pool.req_to_token
    return table[request[0].kv.req_pool_idx, : len(tokens)].to(torch.int64)


def main(out: Path) -> None:
    """Writes what was found, a line each. (Standard output is everybody's.)"""
    for module in ("sglang.benchmark.one_batch", "sglang.srt.models.registry"):
        importlib.import_module(module)  # once, for all children
    processes = multiprocessing.get_context("fork")
    work = [(name, entry[0]) for name, entry in (TURNS | REFUSED).items()]
    with processes.Pool(2, maxtasksperchild=1) as pool:
        found = list(pool.imap_unordered(look_at, work, chunksize=1))
    out.write_text("".join(json.dumps(asdict(finding)) + "\n" for finding in found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The one rotation of a loaded SGLang model's keys, read from its rotary modules and proved.

SGLang turns a key by row p of a table, p being its position. That is one fixed rotation if row p is
scale * (cos(p f), sin(p f)) with the same f for all p. The frequencies f come from the function
that filled the table; then every row is checked against them. Whatever else a model does with its
positions is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leyline.rope import RopeSpec, Unsupported

# Attention classes that do nothing to a key between turning and caching it, in any layer. Others
# norm it after the turn, or leave out layers that have a rotary module all the same. Each was
# probed: tests/sglang/real_rows.py looks at the rows that SGLang writes.
TURNED_LAST = {
    "apertus.ApertusAttention",
    "arcee.ArceeAttention",
    "deepseek_v2.DeepseekV2AttentionMLA",
    "exaone.ExaoneAttention",
    "gemma.GemmaAttention",
    "glm4.Glm4Attention",
    "glm4_moe.Glm4MoeAttention",
    "granite.GraniteAttention",
    "granitemoe.GraniteMoeAttention",
    "hunyuan_v3.HYV3Attention",
    "llama.LlamaAttention",
    "minimax_m2.MiniMaxM2Attention",
    "ministral3.Ministral3Attention",
    "mixtral.MixtralAttention",
    "olmo.OlmoAttention",
    "olmo2.Olmo2Attention",
    "olmoe.OlmoeAttention",
    "persimmon.PersimmonAttention",
    "phi.PhiAttention",
    "phimoe.PhiMoEAttention",
    "qwen2.Qwen2Attention",
    "qwen2_moe.Qwen2MoeAttention",
    "qwen3.Qwen3Attention",
    "qwen3_moe.Qwen3MoeAttention",
    "stablelm.StablelmAttention",
    "starcoder2.Starcoder2Attention",
}
_MODELS = "sglang.srt.models."
_ROWS = 1 << 14
"""Positions proved at a time."""


@dataclass(frozen=True)
class Rotation:
    """How a model turns its keys: the first `spec.width` of `head` columns, in all `layers`."""

    spec: RopeSpec
    head: int
    layers: frozenset[int]


def rope_of(model: nn.Module, positions: int | None = None) -> RopeSpec:
    """The rotation of `model`'s keys, as `rotation_of` finds it."""
    return rotation_of(model, positions).spec


def rotation_of(model: nn.Module, positions: int | None = None) -> Rotation:
    """The rotation that all of a loaded SGLang model's attention layers share.

    positions: how many a request can have (the context length); None: as many as the tables hold.
    SGLang's tables reach further, and not all of them are right there. Raises Unsupported for
    anything that isn't proved to be one fixed rotation.
    """
    found: dict[int, tuple[RopeSpec, int]] = {}  # layers share their module
    first: tuple[RopeSpec, int] | None = None
    layers: list[int] = []
    for layer, attention in _attention_layers(model):
        module = _rotary_module(layer, attention)
        if id(module) not in found:
            found[id(module)] = _proved(module, positions), int(module.head_size)
        spec, head = found[id(module)]
        first = first or (spec, head)
        if head != first[1] or not spec.same_as(first[0]):
            raise _refusal(
                f"layers rotate differently (layers {layers[0]} and {layer})", "several_rotations"
            )
        layers.append(layer)
    if first is None:
        raise _unknown(f"{type(model).__name__} has no attention layers that SGLang caches rows of")
    return Rotation(*first, frozenset(layers))


def _attention_layers(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Each module that caches rows, with the index of its layer."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    for _, module in model.named_modules(remove_duplicate=False):
        inner = [child for child in module.children() if isinstance(child, RadixAttention)]
        for layer in sorted({child.layer_id for child in inner}):
            yield layer, module
        if any(c.is_cross_attention or c.attn_type != AttentionType.DECODER for c in inner):
            raise _unknown(f"{type(model).__name__} is no decoder: its keys are not a prompt's own")


def _rotary_module(layer: int, attention: nn.Module) -> Any:
    """The rotary module that turns the keys of one layer, if nothing else is done to them."""
    kind = type(attention)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not name.startswith(_MODELS) or name.removeprefix(_MODELS) not in TURNED_LAST:
        raise _unknown(
            f"keys of {name} have not been probed: it may do more to them than turn them"
        )
    rotary = [child for child in attention.children() if _is_rotary(child)]
    if not rotary:
        raise _refusal(f"keys of layer {layer} are cached without a position", "no_rotation")
    if len(rotary) > 1:
        raise _refusal(f"layer {layer} has several rotary modules", "several_rotations")
    return rotary[0]


def _is_rotary(module: nn.Module) -> bool:
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    return isinstance(module, RotaryEmbedding) or "Rotary" in type(module).__name__


# -- frequencies ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Claim:
    """What a module's table should hold: row p is scale * (cos(p f), sin(p f))."""

    table: Tensor
    inv_freq: Tensor
    scale: float


def _proved(module: Any, positions: int | None) -> RopeSpec:
    """A rotary module's rotation. Frequencies are computed where the table was: a GPU's powers
    differ in the last bits."""
    table = _table(module, positions)
    if table.is_meta or not table.numel():
        raise _unknown(f"the table of {type(module).__name__} holds nothing")
    wrong = 0
    for device in dict.fromkeys((table.device, torch.device("cpu"))):
        with torch.device(device):
            claim = _claim(module, table)
        wrong = _first_wrong(module, claim)
        if wrong < 0:
            neox = getattr(module, "is_neox_style", True)  # LongRoPE knows nothing else
            inv_freq = claim.inv_freq.double().cpu()
            return RopeSpec(inv_freq, int(module.rotary_dim), interleaved=not neox)
    raise _refusal(
        f"the table of {type(module).__name__} is not one fixed rotation: "
        f"row {wrong} is another than its frequencies give",
        "dynamic_ntk" if "DynamicNTK" in type(module).__name__ else "unknown_rotation",
    )


def _table(module: Any, positions: int | None) -> Tensor:
    """The rows that a request's positions can reach: `[positions, 2 * pairs]`."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding, rope_variant

    kind = type(module)
    if isinstance(module, MRotaryEmbedding):
        raise _refusal(
            "M-RoPE gives a token three positions (time, height, width): a shift isn't one turn",
            "mrope",
        )
    if kind is rope_variant.Phi3LongRoPEScaledRotaryEmbedding:
        original = module.original_max_position_embeddings
        reach = module.max_position_embeddings
        reach = reach if positions is None else min(reach, positions)
        if reach > original:  # one prompt's length decides for the whole batch
            raise _refusal(
                f"LongRoPE changes its frequencies at {original} tokens and requests may have "
                f"{reach}; with --context-length {original} it would be a fixed rotation",
                "longrope_switch",
            )
        return module.short_cos_sin_cache[:reach]
    if kind not in _kinds():
        raise _unknown(f"{kind.__name__} isn't known to be a fixed rotation")
    return module.cos_sin_cache[:positions]


def _claim(module: Any, table: Tensor) -> _Claim:
    """By the formula that filled the module's table."""
    from sglang.srt.layers.rotary_embedding import base, rope_variant, yarn

    kind = type(module)
    if kind is rope_variant.Phi3LongRoPEScaledRotaryEmbedding:
        inv_freq = module._compute_inv_freq(module.short_factor)
        return _Claim(table, inv_freq, module.short_mscale)
    if kind in (yarn.YaRNScalingRotaryEmbedding, rope_variant.DeepseekScalingRotaryEmbedding):
        return _Claim(table, module._compute_inv_freq(module.scaling_factor), module.mscale)
    if kind is base.LinearScalingRotaryEmbedding:
        factors = module.scaling_factors
        if len(factors) != 1:
            raise _refusal(f"positions are scaled by several factors {factors}", "several_tables")
        inv_freq = module._compute_inv_freq(module.base).double() / factors[0]
        return _Claim(table, inv_freq, 1.0)
    return _Claim(table, module._compute_inv_freq(_base(module)), 1.0)


def _base(module: Any) -> float:
    """The base of the frequencies; dynamic NTK raises it once, for the longest prompt."""
    from sglang.srt.layers.rotary_embedding import rope_variant

    kind, base = type(module), module.base
    power = module.rotary_dim / (module.rotary_dim - 2) if module.rotary_dim > 2 else 1.0
    if kind is rope_variant.DynamicNTKAlphaRotaryEmbedding:
        return float(base * module.scaling_alpha**power)
    if kind is rope_variant.DynamicNTKScalingRotaryEmbedding:
        factor, original = module.scaling_factor, module.max_position_embeddings
        longest = original * factor
        return float(base * ((factor * longest / original) - (factor - 1)) ** power)
    return base  # an int stays one: torch raises it in another way


def _kinds() -> set[type]:
    """Classes whose keys turn by their table, and by nothing else."""
    from sglang.srt.layers.rotary_embedding import base, rope_variant, yarn

    return {
        base.RotaryEmbedding,
        base.LinearScalingRotaryEmbedding,
        yarn.YaRNScalingRotaryEmbedding,
        rope_variant.DeepseekScalingRotaryEmbedding,
        rope_variant.DynamicNTKAlphaRotaryEmbedding,
        rope_variant.DynamicNTKScalingRotaryEmbedding,
        rope_variant.Gemma4RotaryEmbedding,
        rope_variant.Llama3RotaryEmbedding,
    }


# -- proof ------------------------------------------------------------------------------------


def _first_wrong(module: Any, claim: _Claim) -> int:
    """The first row of the table that the claim doesn't give, within rounding; -1 if there is none.

    With u = 2^-24: SGLang rounds an angle at most twice in fp32 (2 u of it), cos and sin to two
    units in the last place (2 u) and their product with the scale once (u); a table of another
    dtype is rounded once more.
    """
    table, inv_freq = claim.table, claim.inv_freq.double().to(claim.table.device)
    if table.dim() != 2 or not table.shape[1] == 2 * len(inv_freq) == module.rotary_dim:
        return 0
    unit, info = 2.0**-24, torch.finfo(table.dtype)
    start = getattr(module, "position_start", 0)
    for low in range(0, len(table), _ROWS):
        rows = table[low : low + _ROWS].double()
        at = torch.arange(len(rows), device=table.device, dtype=torch.float64) + (start + low)
        angles = at[:, None] * inv_freq
        exact = torch.cat((angles.cos(), angles.sin()), dim=1) * claim.scale
        bound = (2.01 * angles.repeat(1, 2) + 3.01) * (unit * abs(claim.scale))
        if table.dtype != torch.float32:
            bound += info.eps / 2 * (exact.abs() + bound) + info.smallest_normal * info.eps
        wrong = ~((rows - exact).abs() <= bound).all(dim=1)
        if bool(wrong.any()):
            return low + int(wrong.nonzero()[0])
    return -1


def _refusal(message: str, feature: str) -> Unsupported:
    return Unsupported("unsupported_feature", message, feature)


def _unknown(message: str) -> Unsupported:
    return Unsupported("unsupported_architecture", message, "unknown_architecture")

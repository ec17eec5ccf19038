"""Where each architecture keeps its rotary key columns, and which models can't be spliced.

`layout_of` reads a model's config, `probe` then asks the model itself: it runs one token at two
positions and checks that the cached rows differ by exactly the rotation that the layout claims.
What has not been probed is a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from leyline.rope import RopeSpec, Unsupported

__all__ = ["LayerLayout", "ModelLayout", "RopeSpec", "Unsupported", "layout_of", "probe"]

# Architectures whose *cached* keys pair columns (2i, 2i + 1). DeepSeek-V3 and its kin de-interleave
# before they cache, so their rows are halves, like everyone else's.
_INTERLEAVED = {
    "cohere",
    "deepseek_v2",
    "ernie4_5",
    "ernie4_5_moe",
    "glm",
    "glm4",
    "helium",
}
# Everything else that has been probed: pairs (i, i + width / 2).
_HALVES = set(
    """apertus arcee axk1 bitnet deepseek_v3 flex_olmo gemma glm4_moe glm4_moe_lite gpt_neox
    gpt_neox_japanese granite granitemoe granitemoeshared hy_v3 hyperclovax jais2 llama minicpm3
    minimax_m2 ministral3 mistral mixtral nemotron olmo olmo2 olmoe persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 youtu""".split()
)
_ALIBI = {"bloom", "mpt"}
_LEARNED = {
    "biogpt",
    "ctrl",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "openai-gpt",
    "opt",
    "xglm",
}
_RECURRENT = {"rwkv", "xlstm"}  # Transformers calls their layers full attention

_LAYER_TYPES = {
    "sliding_attention": ("sliding_window", "drops rows that fall out of its sliding window"),
    "chunked_attention": ("sliding_window", "attends within chunks of positions"),
    "linear_attention": ("recurrent_state", "keeps a recurrent state, which has no rows to splice"),
    "conv": ("conv_state", "keeps a convolutional state, which has no rows to splice"),
    "hybrid": ("recurrent_state", "keeps a recurrent state beside its rows"),
    "hybrid_sliding": ("recurrent_state", "keeps a recurrent state and a sliding window"),
    "indexed_attention": ("sparse_index", "chooses rows by an index whose keys are cached apart"),
}


@dataclass(frozen=True)
class LayerLayout:
    """One layer's cached row, as Transformers caches it.

    kind: `mla` (keys: one latent, values: one rotary key), `gqa` (keys and values per head) or
    `none` (nothing rotates).
    key_shape, value_shape: (heads, columns) of the two cached tensors.
    rotary_tensor: which of the two holds rotary columns, `[rotary_start, rotary_start +
    rotary_width)` of each head.
    """

    kind: Literal["mla", "gqa", "none"]
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    rotary_tensor: Literal["keys", "values"] | None
    rotary_start: int = 0
    rotary_width: int = 0


@dataclass(frozen=True)
class ModelLayout:
    """Every layer's row and the one rotation that all rotary layers share.

    known: the architecture is one that Leyline was tested with; for others only `probe` can tell.
    """

    model_type: str
    layers: tuple[LayerLayout, ...]
    rope: RopeSpec | None
    known: bool = True

    @cached_property
    def row_elements(self) -> int:
        """Elements cached for one token, over all layers and both tensors."""
        return sum(
            heads * columns
            for layer in self.layers
            for heads, columns in (layer.key_shape, layer.value_shape)
        )


def layout_of(source: Any) -> ModelLayout:
    """The layout of a model, from its config or (better: with the frequencies it runs with) the
    model itself.

    Raises Unsupported, saying why, for a model that can't be spliced. A hybrid is refused as a
    whole.
    """
    model = source if isinstance(source, nn.Module) else None
    config = source.config if model is not None else source
    model_type = str(getattr(config, "model_type", "") or type(config).__name__)
    _refuse_architecture(config, model_type)
    _refuse_positions(config, model_type)
    _refuse_layers(config, model_type)
    interleaved = model_type in _INTERLEAVED
    if model is not None:
        rope = RopeSpec.from_model(model, interleaved=interleaved)
    else:
        rope = RopeSpec.from_config(config, interleaved=interleaved)
    rotating, still = _layer_kinds(config, rope.width)
    turns = _turning_layers(config)
    return ModelLayout(
        model_type=model_type,
        layers=tuple(rotating if turn else still for turn in turns),
        rope=rope if any(turns) else None,
        known=model_type in _INTERLEAVED or model_type in _HALVES,
    )


def _layer_kinds(config: Any, width: int) -> tuple[LayerLayout, LayerLayout]:
    """The row of a layer with rotary keys and of one without."""
    if getattr(config, "kv_lora_rank", None) and getattr(config, "qk_rope_head_dim", None):
        latent, rotary = (1, config.kv_lora_rank), (1, config.qk_rope_head_dim)
        _check_width(width, rotary[1], "qk_rope_head_dim")
        return (
            LayerLayout("mla", latent, rotary, "values", 0, width),
            LayerLayout("none", latent, rotary, None),
        )
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    columns = getattr(config, "head_dim", None) or (hidden and heads and hidden // heads)
    if not heads or not columns:
        raise Unsupported(
            "unsupported_architecture",
            "the config names no attention heads or head size: the shape of its rows is unknown",
            "unknown_layout",
        )
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    keys = (key_heads, columns)
    values = (key_heads, getattr(config, "v_head_dim", None) or columns)
    _check_width(width, columns, "head size")
    return (
        LayerLayout("gqa", keys, values, "keys", 0, width),
        LayerLayout("none", keys, values, None),
    )


def _check_width(width: int, columns: int, what: str) -> None:
    if width > columns:
        raise Unsupported(
            "unsupported_architecture",
            f"the rotary module turns {width} columns but the {what} is {columns}",
            "unknown_layout",
        )


def _turning_layers(config: Any) -> list[bool]:
    """For each layer whether its keys rotate (SmolLM3 leaves every fourth layer without
    positions)."""
    count = config.num_hidden_layers
    flags = getattr(
        config, "no_rope_layers", None
    )  # Transformers: 1 means that the layer *has* rope
    if flags is None:
        return [True] * count
    if len(flags) < count:
        raise Unsupported(
            "unsupported_architecture",
            f"no_rope_layers names {len(flags)} layers of {count}",
            "unknown_layout",
        )
    return [bool(flag) for flag in flags[:count]]


def _refuse_architecture(config: Any, model_type: str) -> None:
    """Encoders, cross-attention and models that take more than text."""
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        raise Unsupported(
            "unsupported_architecture",
            f"{model_type} attends to an encoder's sequence; only decoders can be spliced",
            "cross_attention",
        )
    if getattr(config, "cross_attention_layers", None):
        raise Unsupported(
            "unsupported_architecture",
            f"{model_type} has cross-attention layers, whose rows belong to no token",
            "cross_attention",
        )
    text = getattr(config, "get_text_config", None)
    if text is not None and text(decoder=True) is not config:
        raise Unsupported(
            "unsupported_architecture",
            f"{model_type} takes more than text; only text models can be spliced",
            "multimodal",
        )
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise Unsupported(
            "unsupported_architecture",
            f"{model_type}'s config names no num_hidden_layers",
            "unknown_layout",
        )


def _refuse_positions(config: Any, model_type: str) -> None:
    """Position schemes that are no rotation of keys."""
    kind = getattr(config, "position_embedding_type", None)
    if model_type in _ALIBI or getattr(config, "alibi", False) or kind == "alibi":
        raise Unsupported(
            "unsupported_feature",
            f"{model_type} uses ALiBi: positions bias the attention scores, no key rotates",
            "alibi",
        )
    if model_type in _LEARNED or kind in ("absolute", "learned_absolute"):
        raise Unsupported(
            "unsupported_feature",
            f"{model_type} adds a position vector to each token: its rows can't change position",
            "learned_positions",
        )
    if model_type in _RECURRENT:
        raise Unsupported(
            "unsupported_feature",
            f"{model_type} keeps a recurrent state, which has no rows to splice",
            "recurrent_state",
        )


def _refuse_layers(config: Any, model_type: str) -> None:
    """Layers that cache anything else than one row per token."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    types = get_layer_types_and_kwargs(config)[0]
    for index, kind in enumerate(types):
        if kind != "full_attention":
            feature, why = _LAYER_TYPES.get(kind, ("unknown_layer", "caches in an unknown way"))
            raise Unsupported(
                "unsupported_feature", f"{model_type}: layer {index} ({kind}) {why}", feature
            )
    indexed = [name for name in ("index_topk", "index_n_heads") if getattr(config, name, None)]
    if indexed:
        raise Unsupported(
            "unsupported_feature",
            f"{model_type} {_LAYER_TYPES['indexed_attention'][1]} ({indexed[0]} in its config)",
            "sparse_index",
        )
    if not getattr(config, "rope_parameters", None) and not getattr(config, "rope_theta", None):
        raise Unsupported(
            "unsupported_feature",
            f"{model_type}'s config has no rotary parameters, so how it places tokens is unknown",
            "no_rotation",
        )
    if len(types) != config.num_hidden_layers:
        raise Unsupported(
            "unsupported_feature",
            f"{model_type} caches {len(types)} layers of {config.num_hidden_layers}; some share",
            "shared_layers",
        )


_PROBE_FROM = 3
_PROBE_DELTAS = (1, 61, 4099)


@torch.inference_mode()
def probe(model: nn.Module, layout: ModelLayout) -> None:
    """Check a layout against the model that it describes; raise Unsupported where they differ.

    Runs one-token prompts at several positions. Attention over one token gives weight 1 to that
    token, so everything but the rotary columns must be equal, in every layer, and the rotary
    columns must be related by R(delta).

    Tolerance of a pair of length m, in the cache's unit roundoff u: the model may round cos and
    sin, two products and their sum, (1 + 2 * sqrt 2) * u * m per row and so at most 8 u m for two
    rows; and it forms its angles in fp32, off by 2^-24 of the angle each.
    """
    _check_frequencies(model, layout)
    limit = getattr(model.config, "max_position_embeddings", None) or 8192
    deltas = sorted({min(delta, limit - 1 - _PROBE_FROM) for delta in _PROBE_DELTAS})
    if deltas[0] < 1:
        raise Unsupported(
            "unsupported_feature",
            f"the model takes {limit} positions, too few to be probed",
            "too_short",
        )
    at = _rows_at(model, layout, _PROBE_FROM)
    for delta in deltas:
        moved = _rows_at(model, layout, _PROBE_FROM + delta)
        for index, layer in enumerate(layout.layers):
            _check_layer(layout, layer, index, at[index], moved[index], delta)


def _check_frequencies(model: nn.Module, layout: ModelLayout) -> None:
    """Low frequencies barely turn within a probe's reach: compare the numbers as well."""
    if layout.rope is None:
        return
    try:
        own = RopeSpec.from_model(model, interleaved=layout.rope.interleaved)
    except Unsupported as problem:
        if problem.feature == "no_frequencies":  # an unknown rotary module: the rows must tell
            return
        raise
    if own.width != layout.rope.width or not torch.equal(own.inv_freq, layout.rope.inv_freq):
        raise Unsupported(
            "unsupported_architecture",
            f"the layout's frequencies ({layout.rope.width} rotary columns) are not those that the "
            f"model runs with ({own.width} columns); take the layout from the model itself",
            "probe_failed",
        )


def _rows_at(model: nn.Module, layout: ModelLayout, position: int) -> list[tuple[Tensor, Tensor]]:
    """Each layer's cached (keys, values), `[tokens, heads, columns]`, of one-token prompts at a
    position."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    table = cast(nn.Embedding, cast(Any, model).get_input_embeddings()).weight
    tokens = torch.tensor([[1], [7], [101]], device=table.device) % table.shape[0]
    positions = torch.full_like(tokens, position)
    cache = DynamicCache(config=cast(Any, model).config)
    was_training = model.training
    model.eval()
    try:
        model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)
    except TypeError as problem:
        raise Unsupported(
            "unsupported_architecture",
            f"{type(model).__name__} can't be called with position_ids and a cache: {problem}",
            "probe_failed",
        ) from problem
    finally:
        model.train(was_training)
    if len(cache.layers) != len(layout.layers):
        raise _failed(f"the model caches {len(cache.layers)} layers, not {len(layout.layers)}")
    rows = []
    for index, (found, layer) in enumerate(zip(cache.layers, layout.layers, strict=True)):
        if type(found) is not DynamicLayer or found.keys is None or found.values is None:
            raise _failed(f"layer {index} doesn't cache plain rows but {type(found).__name__}")
        for name, tensor, (heads, columns) in (
            ("keys", found.keys, layer.key_shape),
            ("values", found.values, layer.value_shape),
        ):
            if tensor.shape != (3, heads, 1, columns):
                raise _failed(
                    f"layer {index} caches {name} of shape {tuple(tensor.shape)}, "
                    f"not (3, {heads}, 1, {columns})"
                )
        rows.append((found.keys[:, :, 0].cpu(), found.values[:, :, 0].cpu()))
    return rows


def _check_layer(
    layout: ModelLayout,
    layer: LayerLayout,
    index: int,
    at: tuple[Tensor, Tensor],
    moved: tuple[Tensor, Tensor],
    delta: int,
) -> None:
    """Compare one layer's rows at two positions that are `delta` apart."""
    for name, before, after in (("keys", at[0], moved[0]), ("values", at[1], moved[1])):
        start, width = 0, 0
        if name == layer.rotary_tensor and layout.rope is not None:
            start, width = layer.rotary_start, layer.rotary_width
        fixed = torch.ones(before.shape[-1], dtype=torch.bool)
        fixed[start : start + width] = False
        if not _equal(before[..., fixed], after[..., fixed], exact=index == 0):
            raise _failed(
                f"layer {index}: {name} outside columns [{start}, {start + width}) "
                "change with the position"
            )
        if width and layout.rope is not None:
            turned = slice(start, start + width)
            problem = _check_turn(layout.rope, before[..., turned], after[..., turned], delta)
            if problem:
                raise _failed(f"layer {index}: {name} {problem}")


def _equal(before: Tensor, after: Tensor, exact: bool) -> bool:
    """Bitwise in layer 0; deeper, a GPU's atomic sums may differ in the last bits."""
    if exact or before.numel() == 0:
        return torch.equal(before, after)
    size = before.abs().amax().double()
    close = 8 * torch.finfo(before.dtype).eps * size
    return bool(((before.double() - after.double()).abs() <= close).all())


def _check_turn(rope: RopeSpec, before: Tensor, after: Tensor, delta: int) -> str | None:
    """What is wrong with `after == R(delta) before`, or None."""
    if rope.width != before.shape[-1]:
        return f"rotate {before.shape[-1]} columns, but the rotation has {rope.width}"
    if not before.any():
        return "are all zero: the model's weights seem to be missing"
    old, new = _as_complex(before, rope), _as_complex(after, rope)
    cos, sin = rope.cos_sin(delta)
    error = (new - old * torch.complex(cos, sin)).abs()
    length = torch.maximum(old.abs(), new.abs())
    unit = torch.finfo(before.dtype).eps / 2
    angles = (2 * _PROBE_FROM + delta) * rope.inv_freq
    bound = length * (8 * unit + 2 * 2.0**-24 * (angles + 4)) + torch.finfo(before.dtype).tiny
    if bool((error <= bound).all()):
        return None
    worst = float((error / bound).max())
    return (
        f"at positions {delta} apart are not related by the rotation that the layout claims "
        f"(off by {worst:.3g} times what rounding explains)"
    )


def _as_complex(rows: Tensor, rope: RopeSpec) -> Tensor:
    """Pairs as complex128, `[..., width / 2]`."""
    rows = rows.double()
    if rope.interleaved:
        return torch.complex(rows[..., 0::2], rows[..., 1::2])
    half = rope.width // 2
    return torch.complex(rows[..., :half], rows[..., half:])


def _failed(what: str) -> Unsupported:
    return Unsupported("unsupported_architecture", f"probe failed: {what}", "probe_failed")

"""Layouts are what the models cache; what can't be spliced is refused, never silently wrong."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from leyline import layout as layout_module
from leyline.layout import LayerLayout, ModelLayout, Unsupported, layout_of, probe
from leyline.rope import RopeSpec
from leyline.tiny import TINY, tiny_config, tiny_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MLA = LayerLayout("mla", (1, 512), (1, 64), "values", 0, 64)

EXPECTED = {
    "deepseek_v2": (MLA, True),
    "moonlight": (MLA, False),
    "joyai_flash": (MLA, False),
    "glm4_moe_lite": (MLA, False),
    "llama": (LayerLayout("gqa", (2, 64), (2, 64), "keys", 0, 64), False),
    "qwen3": (LayerLayout("gqa", (2, 128), (2, 128), "keys", 0, 128), False),
    "phi": (LayerLayout("gqa", (4, 80), (4, 80), "keys", 0, 32), False),
    "gpt_neox": (LayerLayout("gqa", (4, 64), (4, 64), "keys", 0, 16), False),
    "glm4": (LayerLayout("gqa", (2, 128), (2, 128), "keys", 0, 64), True),
    "smollm3": (LayerLayout("gqa", (1, 16), (1, 16), "keys", 0, 16), False),
}


@pytest.mark.parametrize("name", TINY)
def test_layouts(name: str) -> None:
    """I2: which tensor and which columns rotate."""
    layout = layout_of(tiny_config(name))
    layer, interleaved = EXPECTED[name]
    assert layout.layers[0] == layer
    assert layout.rope is not None and layout.rope.interleaved is interleaved
    assert layout.known
    kinds = [each.kind for each in layout.layers]
    assert kinds == (["gqa"] * 3 + ["none"] if name == "smollm3" else [layer.kind] * 3)
    assert layout.row_elements == len(kinds) * sum(
        heads * columns for heads, columns in (layer.key_shape, layer.value_shape)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TINY)
def test_probe_agrees(name: str, dtype: torch.dtype) -> None:
    """I3: in every architecture, layer and dtype the rows move as the layout says."""
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")  # shown if the test fails
    model = tiny_model(name, dtype, seed)
    model.train()
    probe(model, layout_of(model))
    assert model.training


def _other_pairing(layout: ModelLayout) -> ModelLayout:
    rope = layout.rope
    assert rope is not None
    return replace(layout, rope=RopeSpec(rope.inv_freq, rope.width, not rope.interleaved))


def _with_rope(layout: ModelLayout, rope: RopeSpec) -> ModelLayout:
    layers = tuple(
        replace(layer, rotary_width=rope.width) if layer.rotary_tensor else layer
        for layer in layout.layers
    )
    return replace(layout, layers=layers, rope=rope)


def _narrower(layout: ModelLayout) -> ModelLayout:
    rope = layout.rope
    assert rope is not None
    return _with_rope(layout, RopeSpec(rope.inv_freq[:-1], rope.width - 2, rope.interleaved))


def _faster(layout: ModelLayout) -> ModelLayout:
    rope = layout.rope
    assert rope is not None
    return replace(layout, rope=RopeSpec(rope.inv_freq * 1.01, rope.width, rope.interleaved))


def _backwards(layout: ModelLayout) -> ModelLayout:
    rope = layout.rope
    assert rope is not None
    return replace(layout, rope=RopeSpec(-rope.inv_freq, rope.width, rope.interleaved))


def _still(layout: ModelLayout) -> ModelLayout:
    layers = tuple(
        replace(each, kind="none", rotary_tensor=None, rotary_width=0) for each in layout.layers
    )
    return replace(layout, layers=layers, rope=None)


def _other_tensor(layout: ModelLayout) -> ModelLayout:
    swap = {"keys": "values", "values": "keys", None: None}
    layers = tuple(
        replace(each, rotary_tensor=swap[each.rotary_tensor])  # type: ignore[arg-type]
        for each in layout.layers
    )
    return replace(layout, layers=layers)


def _one_layer_less(layout: ModelLayout) -> ModelLayout:
    return replace(layout, layers=layout.layers[:-1])


def _more_heads(layout: ModelLayout) -> ModelLayout:
    heads, columns = layout.layers[0].key_shape
    return replace(
        layout,
        layers=(replace(layout.layers[0], key_shape=(heads + 1, columns)), *layout.layers[1:]),
    )


TAMPERINGS = (
    _other_pairing,
    _narrower,
    _faster,
    _backwards,
    _still,
    _other_tensor,
    _one_layer_less,
    _more_heads,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda tamper: tamper.__name__)
@pytest.mark.parametrize("name", ["deepseek_v2", "moonlight", "llama", "phi", "glm4", "smollm3"])
def test_probe_catches(name: str, tamper: Any, dtype: torch.dtype, monkeypatch: Any) -> None:
    """I3: a wrong layout is caught by the rows alone, without comparing frequencies."""
    monkeypatch.setattr(layout_module, "_check_frequencies", lambda model, layout: None)
    model = tiny_model(name, dtype)
    wrong = tamper(layout_of(model))
    with pytest.raises(Unsupported) as refusal:
        probe(model, wrong)
    assert refusal.value.reason == "unsupported_architecture"
    assert refusal.value.message.startswith("probe failed: ")


def test_probe_compares_frequencies() -> None:
    """I3: low frequencies barely turn in a probe's reach; their numbers are compared as well."""
    model = tiny_model("llama", torch.bfloat16)
    layout = layout_of(model)
    assert layout.rope is not None
    frequencies = layout.rope.inv_freq.clone()
    frequencies[-1] *= 1.0001
    with pytest.raises(Unsupported, match="frequencies"):
        probe(model, replace(layout, rope=RopeSpec(frequencies, layout.rope.width, False)))


def test_probe_catches_yarn_read_as_default() -> None:
    """I3: the scaling forgotten."""
    model = tiny_model("deepseek_v2")
    plain = dict(rope_type="default", rope_theta=10000.0)
    rope = RopeSpec.from_config(tiny_config("deepseek_v2", rope_parameters=plain), interleaved=True)
    with pytest.raises(Unsupported):
        probe(model, replace(layout_of(model), rope=rope))


def test_probe_catches_learned_positions() -> None:
    """A learned-position model given a rotary layout, or one without rotation."""
    config = CONFIG_MAPPING["gpt2"](
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=4200, initializer_range=0.2
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    still = LayerLayout("none", (2, 16), (2, 16), None)
    turning = LayerLayout("gqa", (2, 16), (2, 16), "keys", 0, 16)
    rope = RopeSpec(10000.0 ** -(torch.arange(0, 16, 2).double() / 16), 16, False)
    for layout in (
        ModelLayout("gpt2", (turning,) * 2, rope),
        ModelLayout("gpt2", (still,) * 2, None),
    ):
        with pytest.raises(Unsupported, match="layer 0"):
            probe(model, layout)


def test_probe_catches_keys_normed_after_the_turn() -> None:
    """A model that scales columns after it rotates them: its rows are no rotation of each other."""
    config = CONFIG_MAPPING["hunyuan_v1_dense"](
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.1,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "layernorm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    layout = layout_of(model)
    assert not layout.known
    with pytest.raises(Unsupported, match="rotation"):
        probe(model, layout)


def test_probe_needs_weights() -> None:
    """All-zero keys would agree with any layout."""
    model = tiny_model("llama")
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    with pytest.raises(Unsupported, match="weights"):
        probe(model, layout_of(model))


def test_an_unknown_type_is_a_guess_until_probed() -> None:
    """An architecture that isn't listed is read like a plain decoder, and says so."""
    config = tiny_config("llama")
    config.model_type = "llama_of_tomorrow"
    layout = layout_of(config)
    assert not layout.known
    probe(tiny_model("llama"), layout)


REFUSED = {
    "bloom": ("bloom", {}, "alibi"),
    "mpt": ("mpt", {}, "alibi"),
    "falcon with alibi": ("falcon", dict(alibi=True), "alibi"),
    "gpt2": ("gpt2", {}, "learned_positions"),
    "opt": ("opt", {}, "learned_positions"),
    "gpt_neo": ("gpt_neo", {}, "learned_positions"),
    "mamba2": ("mamba2", {}, "recurrent_state"),
    "rwkv": ("rwkv", {}, "recurrent_state"),
    "jamba": ("jamba", {}, "recurrent_state"),
    "qwen3_next": ("qwen3_next", {}, "recurrent_state"),
    "falcon_h1": ("falcon_h1", {}, "recurrent_state"),
    "lfm2": ("lfm2", dict(layer_types=["full_attention"] * 31 + ["conv"]), "conv_state"),
    "mistral with a window": ("mistral", dict(sliding_window=4096), "sliding_window"),
    "gemma3": ("gemma3_text", {}, "sliding_window"),
    "gpt_oss": ("gpt_oss", {}, "sliding_window"),
    "llama4": ("llama4_text", {}, "sliding_window"),
    "deepseek_v32": ("deepseek_v32", {}, "sparse_index"),
    "glm_moe_dsa": ("glm_moe_dsa", {}, "sparse_index"),
    "bart": ("bart", {}, "cross_attention"),
    "t5": ("t5", {}, "cross_attention"),
    "qwen2_vl": ("qwen2_vl", {}, "multimodal"),
    "bert": ("bert", {}, "no_rotation"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    """I6: what can't be spliced is refused with a reason word and one sentence."""
    model_type, settings, feature = REFUSED[case]
    with pytest.raises(Unsupported) as refusal:
        layout_of(CONFIG_MAPPING[model_type](**settings))
    assert refusal.value.feature == feature
    assert refusal.value.reason in ("unsupported_architecture", "unsupported_feature")
    message = refusal.value.message
    assert "\n" not in message and len(message.split()) > 5


def test_dynamic_ntk_is_refused() -> None:
    parameters = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    with pytest.raises(Unsupported) as refusal:
        layout_of(tiny_config("llama", rope_parameters=parameters))
    assert refusal.value.feature == "dynamic_ntk"

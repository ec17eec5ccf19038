"""I3: the rotation is the model's own, read and not guessed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from leyline.layout import layout_of, probe
from leyline.rope import RopeSpec, Unsupported
from leyline.tiny import TINY, tiny_config, tiny_model

YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=2048)


def _longrope(short: float, long: float, original: int) -> dict:
    half = 32
    return dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[short] * half,
        long_factor=[long] * half,
        original_max_position_embeddings=original,
    )


FIXED = {
    "default": dict(rope_type="default", rope_theta=10000.0),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    "yarn": YARN,
    "yarn with mscale": dict(**YARN, mscale=0.707, mscale_all_dim=0.707),
    "yarn with unequal mscale": dict(**YARN, mscale=1.0, mscale_all_dim=0.5),
    "llama3": dict(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=2048,
    ),
    "longrope, equal factors": _longrope(1.5, 1.5, 2048),
    "longrope, never long": _longrope(1.5, 8.0, 8192),
}


@pytest.mark.parametrize("name", TINY)
def test_frequencies_are_the_models_own(name: str) -> None:
    """I3: bit for bit the fp32 numbers of the rotary module, held in fp64."""
    model = tiny_model(name)
    own = next(b for n, b in model.named_buffers() if n.endswith(".inv_freq"))
    for spec in (RopeSpec.from_model(model), RopeSpec.from_config(model.config)):
        assert spec.inv_freq.dtype == torch.float64
        assert torch.equal(spec.inv_freq, own.double())
        assert spec.width == 2 * len(own)


@pytest.mark.parametrize("kind", FIXED)
def test_fixed_rotations_are_read_and_true(kind: str) -> None:
    """I3: every scaling that is one rotation, checked against the rows of a model that uses it."""
    model = tiny_model("llama", rope_parameters=dict(FIXED[kind]), max_position_embeddings=8192)
    layout = layout_of(model.config)
    probe(model, layout)


def test_scalings_differ() -> None:
    """I3: the kinds above are really different rotations, so that none stands in for another."""
    found = {}
    for kind in ("default", "linear", "yarn", "llama3"):
        config = tiny_config("llama", rope_parameters=dict(FIXED[kind]))
        found[kind] = tuple(RopeSpec.from_config(config).inv_freq.tolist())
    assert len(set(found.values())) == len(found)


def test_attention_scaling_is_left_out() -> None:
    """I3: YaRN scales cos and sin in the model, but R(delta) keeps lengths."""
    model = tiny_model("llama", rope_parameters=dict(YARN), max_position_embeddings=8192)
    assert model.model.rotary_emb.attention_scaling > 1.1
    cos, sin = RopeSpec.from_model(model).cos_sin(torch.tensor([1, -77, 8000]))
    assert torch.allclose(cos**2 + sin**2, torch.ones_like(cos), atol=1e-15, rtol=0)


@pytest.mark.parametrize(
    ("parameters", "feature"),
    [
        (dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0), "dynamic_ntk"),
        (dict(rope_type="default", rope_theta=1e6, mrope_section=[8, 12, 12]), "mrope"),
        (dict(rope_type="mrope", rope_theta=1e6), "mrope"),
        (dict(rope_type="spiral", rope_theta=1e6), "unknown_rotation"),
        (_longrope(1.5, 8.0, 2048), "longrope_switch"),
    ],
)
def test_moving_rotations_are_refused(parameters: dict, feature: str) -> None:
    """I3: what isn't one rotation for all lengths is refused, in a sentence."""
    config = tiny_config("llama", max_position_embeddings=8192)
    config.rope_parameters = parameters
    with pytest.raises(Unsupported) as refusal:
        RopeSpec.from_config(config)
    assert refusal.value.reason == "unsupported_feature"
    assert refusal.value.feature == feature
    assert len(refusal.value.message.split()) > 5


def test_layer_types_with_one_rotation_are_one() -> None:
    """Nested parameters are read if they agree, and refused if not."""
    same = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
    config = tiny_config("llama")
    config.rope_parameters = {"full_attention": dict(same), "other": dict(same)}
    from leyline.rope import check_fixed

    check_fixed(config)
    config.rope_parameters["other"]["factor"] = 2.0
    with pytest.raises(Unsupported) as refusal:
        check_fixed(config)
    assert refusal.value.feature == "several_rotations"
    check_fixed(config, "other")


def test_a_cast_model_runs_with_rounded_frequencies() -> None:
    """I3: `model.to(bfloat16)` rounds the frequencies; the spec follows the model, not the
    config."""
    model = tiny_model("llama").to(torch.bfloat16)
    config_spec, model_spec = RopeSpec.from_config(model.config), RopeSpec.from_model(model)
    assert not config_spec.same_as(model_spec)
    probe(model, layout_of(model))
    with pytest.raises(Unsupported):
        probe(model, layout_of(model.config))


def test_models_without_or_with_two_rotations() -> None:
    class Rotary(nn.Module):
        def __init__(self, base: float) -> None:
            super().__init__()
            powers = torch.arange(0, 8, 2) / 8
            self.inv_freq = nn.Buffer(base**-powers, persistent=False)

    assert RopeSpec.from_model(nn.Sequential(Rotary(1e4), Rotary(1e4))).width == 8
    with pytest.raises(Unsupported) as two:
        RopeSpec.from_model(nn.Sequential(Rotary(1e4), Rotary(1e5)))
    assert two.value.feature == "several_rotations"
    with pytest.raises(Unsupported) as none:
        RopeSpec.from_model(nn.Linear(2, 2))
    assert none.value.feature == "no_frequencies"
    with pytest.raises(Unsupported):
        RopeSpec.from_module(nn.Linear(2, 2))


@pytest.mark.parametrize("delta", [0, 1, -1, 4096, -(2**31), 2**31 - 1])
def test_cos_sin_are_fp64(delta: int) -> None:
    """I3: angles in fp64, however far."""
    spec = RopeSpec(torch.tensor([1.0, 0.1, 1e-5, 3e-8], dtype=torch.float64), 8, False)
    cos, sin = spec.cos_sin(delta)
    for i, frequency in enumerate(spec.inv_freq.tolist()):
        assert math.isclose(cos[i], math.cos(delta * frequency), abs_tol=1e-15)
        assert math.isclose(sin[i], math.sin(delta * frequency), abs_tol=1e-15)
    many = spec.cos_sin(torch.tensor([[delta, 3]]))
    assert many[0].shape == (1, 2, 4)
    assert torch.equal(many[0][0, 0], cos)


def test_specs_that_make_no_sense_are_refused() -> None:
    frequencies = torch.ones(4, dtype=torch.float64)
    for width in (0, 6, 7, 10):
        with pytest.raises(ValueError, match="width"):
            RopeSpec(frequencies, width, False)
    with pytest.raises(ValueError, match="float64"):
        RopeSpec(frequencies.float(), 8, False)

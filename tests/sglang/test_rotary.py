"""I3: the rotation that rows are turned by is the model's own, or the model is refused."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from real_rows import REFUSED, TURNS
from rotation_bounds import fresh_generator
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding, get_rope
from sglang.srt.layers.rotary_embedding.factory import get_rope_cpu
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
from sglang.srt.models.exaone4 import Exaone4Attention
from sglang.srt.models.llama import LlamaAttention
from torch import Tensor, nn

from leyline.rope import Unsupported
from leyline.rotate import rotate_reference
from leyline.sglang import rotary
from leyline.sglang.rotary import rope_of, rotation_of

HERE = Path(__file__).parent
_YARN = dict(factor=8.0, original_max_position_embeddings=512, beta_fast=32, beta_slow=1)
_LLAMA3 = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512
)
_LONG = dict(
    short_factor=[1.0 + i / 100 for i in range(32)],
    long_factor=[1.0 + i for i in range(32)],
    original_max_position_embeddings=4096,
)
KINDS: dict[str, dict[str, Any] | None] = {  # rope_scaling
    "plain": None,
    "default": dict(rope_type="default"),
    "llama3": dict(rope_type="llama3", **_LLAMA3),
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "dynamic, alpha": dict(rope_type="dynamic", factor=1.0, alpha=1000.0),
    "yarn": dict(rope_type="yarn", **_YARN),
    "yarn, mscale": dict(rope_type="yarn", mscale=1.0, mscale_all_dim=0.5, **_YARN),
    "deepseek_yarn": dict(rope_type="deepseek_yarn", mscale=1.0, mscale_all_dim=0.7, **_YARN),
    "proportional": dict(rope_type="proportional"),
    "longrope": dict(rope_type="longrope", **_LONG),
}


def _rope(
    kind: str, *, neox: bool = True, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A rotary module as SGLang builds it; a copy, since SGLang shares them."""
    arguments = dict(head_size=64, rotary_dim=64, max_position=4096, base=10000) | changes
    scaling = KINDS[kind]
    build = get_rope_cpu if kind == "deepseek_yarn" else get_rope
    return copy.deepcopy(build(**arguments, is_neox_style=neox, rope_scaling=scaling, dtype=dtype))


def _attention(layer: int, module: nn.Module | None, kind: type[nn.Module] = LlamaAttention) -> Any:
    """SGLang's attention module, without its projections."""
    attention = kind.__new__(kind)
    nn.Module.__init__(attention)
    attention.rotary_emb = module
    attention.attn = RadixAttention(4, 64, 1.0, num_kv_heads=2, layer_id=layer)
    return attention


def _model(*modules: nn.Module | None) -> nn.Module:
    layers = [_attention(layer, module) for layer, module in enumerate(modules)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers)})


def _refusal(model: nn.Module, positions: int | None = None) -> Unsupported:
    with pytest.raises(Unsupported) as refused:
        rope_of(model, positions)
    return refused.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("neox", [True, False], ids=["halves", "interleaved"])
@pytest.mark.parametrize("kind", KINDS)
def test_turning_is_what_the_module_does(kind: str, neox: bool, dtype: torch.dtype) -> None:
    """I3: R(d) of the module's key at p is its key at p + d; attention scaling cancels.

    With u the roundoff of the module's dtype, each of the two keys is off by the roundings of its
    cos, sin, products and sum (at most 4 u of a pair's length) and by its angle, which SGLang
    rounds twice in fp32.
    """
    if kind == "longrope" and not neox:
        pytest.skip("SGLang's LongRoPE has halves only")
    module = _rope(kind, neox=neox, dtype=dtype)
    spec = rope_of(_model(module, module))
    assert spec.width == 64 and spec.interleaved == (not neox)
    generator = fresh_generator()
    keys = torch.randn(200, 1, 64, generator=generator).to(dtype)
    at = torch.randint(0, 3000, (200,), generator=generator)
    shifts = torch.randint(0, 1000, (200,), generator=generator)
    before, after = _turned(module, at, keys), _turned(module, at + shifts, keys)
    exact = rotate_reference(before, shifts, spec)
    pairs = spec.inv_freq.repeat(2) if neox else spec.inv_freq.repeat_interleave(2)
    length = _lengths(after, neox)
    unit = torch.finfo(dtype).eps / 2
    angles = (2 * at + shifts)[:, None, None] * pairs
    bound = length * (2 * 4.5 * unit + 2.0**-24 * (2.01 * angles + 8))
    assert bool(((exact - after.double()).abs() <= bound + torch.finfo(dtype).tiny).all())
    wrong = rotate_reference(before, shifts + 1, spec)
    assert not bool(((wrong - after.double()).abs() <= bound).all())


def _turned(module: Any, positions: Tensor, keys: Tensor) -> Tensor:
    forward = getattr(module, "forward_native", module.forward)
    by_head = isinstance(module, DeepseekScalingRotaryEmbedding)  # others take heads in one piece
    rows = keys if by_head else keys.flatten(1)
    return forward(positions, rows.clone(), rows.clone())[1].view(keys.shape)


def _lengths(rows: Tensor, neox: bool) -> Tensor:
    rows = rows.double()
    if neox:
        low, high = rows.chunk(2, dim=-1)
        return torch.hypot(low, high).repeat(1, 1, 2)
    return torch.hypot(rows[..., 0::2], rows[..., 1::2]).repeat_interleave(2, dim=-1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("longrope",)])
def test_every_row_of_the_table_is_proved(kind: str) -> None:
    """I3: one entry off by more than rounding, anywhere, and the model is refused."""
    generator = fresh_generator()
    for dtype in (torch.float32, torch.bfloat16):
        module = _rope(kind, dtype=dtype)
        rope_of(_model(module))
        table = module.cos_sin_cache
        row = int(torch.randint(1, len(table), (1,), generator=generator))
        column = int(torch.randint(0, 4, (1,), generator=generator))  # cos of fast pairs
        table[row, column] += 0.02 if table[row, column] < 0 else -0.02
        assert f"row {row}" in _refusal(_model(module)).message
        assert rope_of(_model(module), row).width == 64  # out of reach, it doesn't matter


def test_frequencies_are_proved_to_six_digits() -> None:
    module = _rope("plain")
    rope_of(_model(module))
    module.base *= 1 + 1e-6  # what the table was made with is another
    assert "not one fixed rotation" in _refusal(_model(module)).message


@pytest.mark.parametrize("kind", ["linear", "dynamic", "dynamic, alpha"])
def test_rows_that_sglang_adds_wrongly_must_be_out_of_reach(kind: str) -> None:
    """SGLang lengthens these tables by unscaled frequencies, past the context length."""
    module = _rope(kind)
    reach = len(module.cos_sin_cache)
    module._ensure_cos_sin_cache_length(reach + 100)
    assert rope_of(_model(module), reach).width == 64
    assert f"row {reach}" in _refusal(_model(module), reach + 1).message
    assert (_refusal(_model(module)).feature == "dynamic_ntk") == kind.startswith("dynamic")


def test_tables_that_sglang_lengthens_rightly_are_proved() -> None:
    for kind in ("plain", "llama3", "yarn", "deepseek_yarn"):
        module = _rope(kind)
        reach = len(module.cos_sin_cache)
        module._ensure_cos_sin_cache_length(reach + 100)
        assert len(module.cos_sin_cache) > reach
        assert rope_of(_model(module)).width == 64


def test_a_part_of_the_head_may_turn() -> None:
    rotation = rotation_of(_model(*[_rope("plain", rotary_dim=24, neox=False)] * 3))
    assert rotation.spec.width == 24 and rotation.spec.interleaved
    assert rotation.head == 64 and rotation.layers == {0, 1, 2}


def test_longrope_that_switches_is_refused() -> None:
    module = _rope("longrope", max_position=8192)
    refused = _refusal(_model(module))
    assert refused.feature == "longrope_switch" and "4096" in refused.message
    assert rope_of(_model(module), 4096).width == 64  # no request reaches the switch
    module.short_cos_sin_cache[77, 3] += 0.01
    assert "row 77" in _refusal(_model(module), 4096).message


def test_mrope_is_refused() -> None:
    module = MRotaryEmbedding(64, 64, 512, 10000, True, torch.float32, mrope_section=[8, 12, 12])
    assert _refusal(_model(module)).feature == "mrope"


def test_layers_must_agree() -> None:
    plain = _rope("plain")
    assert rope_of(_model(plain, _rope("plain"))).width == 64  # the same, in two modules
    for other in (
        _rope("plain", base=20000),
        _rope("plain", neox=False),
        _rope("plain", rotary_dim=32),
        _rope("plain", head_size=128),
    ):
        assert _refusal(_model(plain, plain, other)).feature == "several_rotations"


def test_layers_without_positions_are_refused() -> None:
    plain = _rope("plain")
    refused = _refusal(_model(plain, None))
    assert refused.feature == "no_rotation" and "layer 1" in refused.message


def test_attention_that_was_not_probed_is_refused() -> None:
    """EXAONE 4 has a rotary module in every layer and doesn't use it in some."""
    model = nn.ModuleList([_attention(0, _rope("plain"), Exaone4Attention)])
    assert "Exaone4Attention" in _refusal(model).message
    hidden = type("LlamaAttention", (LlamaAttention,), {"__module__": "elsewhere"})
    assert "elsewhere" in _refusal(nn.ModuleList([_attention(0, _rope("plain"), hidden)])).message


def test_models_that_are_no_decoders_are_refused() -> None:
    assert "attention" in _refusal(nn.Linear(2, 2)).message
    attention = _attention(0, _rope("plain"))
    attention.attn.attn_type = AttentionType.ENCODER_ONLY
    assert "decoder" in _refusal(nn.ModuleList([attention])).message


def test_unknown_rotary_modules_are_refused() -> None:
    class OwnRotary(type(_rope("plain"))):  # type: ignore[misc]
        pass

    module = _rope("plain")
    module.__class__ = OwnRotary
    assert "OwnRotary" in _refusal(_model(module)).message


# -- rows that SGLang writes ------------------------------------------------------------------


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Looked at once, whichever of the processes that share the tests comes first."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "real_rows.lock"):
        path = folder / "real_rows.jsonl"
        if not path.exists():
            done = subprocess.run(
                [sys.executable, str(HERE / "real_rows.py"), str(path)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True,
                text=True,
                timeout=900,
            )
            assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == len(TURNS) + len(REFUSED)
    return {each["name"]: each for each in found}


@pytest.mark.parametrize("name", TURNS)
def test_rows_of_real_models(name: str, findings: dict[str, dict[str, Any]]) -> None:
    """I2, I3 against SGLang's own prefill, in fp32, in every layer.

    Three layers of fp32 arithmetic: 1e-5 of the largest key is 84 roundoffs. A turn that is off by
    one position changes the fastest pair by its whole length.
    """
    found = findings[name]
    _, width, interleaved = TURNS[name]
    assert not found["failed"] and not found["refused"]
    assert (found["width"], found["interleaved"]) == (width, interleaved)
    assert max(found["errors"]) < 1e-5 and found["copied"] < 1e-5
    assert found["unturned"] > 0.5
    assert found["values_equal"]


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_do_more_to_a_key(name: str, findings: dict[str, dict[str, Any]]) -> None:
    assert not findings[name]["failed"]
    assert REFUSED[name][1] in findings[name]["refused"]


def test_every_known_attention_class_was_probed(findings: dict[str, dict[str, Any]]) -> None:
    probed = {module for name in TURNS for module in findings[name]["modules"]}
    assert {f"sglang.srt.models.{name}" for name in rotary.TURNED_LAST} <= probed

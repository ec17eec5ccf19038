"""I2 and I3 on SGLang's own pools: what turns is rounded once, the rest is bitwise what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rotation_bounds import DTYPES, fresh_generator, rotary_bound
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MLATokenToKVPool,
)
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
from sglang.srt.models.llama import LlamaAttention
from torch import Tensor, nn

from leyline import rotate
from leyline.rope import Unsupported
from leyline.rotate import rotate_reference
from leyline.sglang.rows import Rows

LAYERS, SIZE = 3, 208
POOLS = ["mla", "mha", "mha, wider values", "mha, part turns", "mha, interleaved"]


def _pool(name: str, dtype: torch.dtype, page: int, **changes: Any) -> Any:
    common = dict(
        size=SIZE,
        page_size=page,
        dtype=dtype,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    if name == "mla":
        shape: dict[str, Any] = dict(kv_lora_rank=48, qk_rope_head_dim=16)
        return MLATokenToKVPool(**common | shape | changes)
    shape = dict(head_num=2, head_dim=32, v_head_dim=48 if "values" in name else None)
    return MHATokenToKVPool(**common | shape | changes)


def _model(name: str, layers: int = LAYERS, **changes: Any) -> nn.Module:
    """As SGLang builds it, without what has no part in positions."""
    mla = name == "mla"
    kind = DeepseekV2AttentionMLA if mla else LlamaAttention
    shape = dict(head_size=16, rotary_dim=16) if mla else dict(head_size=32, rotary_dim=32)
    if "part" in name:
        shape["rotary_dim"] = 12
    neox = not (mla or "interleaved" in name)
    shape |= changes
    model = nn.ModuleList()
    for layer in range(layers):
        attention = kind.__new__(kind)
        nn.Module.__init__(attention)
        attention.rotary_emb = get_rope(
            **shape, max_position=512, base=10000, is_neox_style=neox, dtype=torch.float32
        )
        attention.attn = RadixAttention(4, 32, 1.0, num_kv_heads=2, layer_id=layer)
        model.append(attention)
    return model


def _rows(name: str, dtype: torch.dtype, page: int, generator: torch.Generator) -> Rows:
    """Rows of a pool full of random numbers."""
    pool = _pool(name, dtype, page)
    rows = Rows.of(pool, _model(name))
    buffers = pool.kv_buffer if name == "mla" else [*pool.k_buffer, *pool.v_buffer]
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return rows


def _all(rows: Rows) -> list[tuple[Tensor, ...]]:
    return rows.read(torch.arange(rows.keys.slots))


def _bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int32 if rows.element_size() == 4 else torch.int16)


def _check(
    rows: Rows,
    before: list[tuple[Tensor, ...]],
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    in_place: bool = False,
) -> None:
    """I2, I3 in every layer, and every slot that was not named is as before."""
    others = torch.ones(rows.keys.slots, dtype=torch.bool)
    others[dst] = False
    start = 48 if rows.values is None else 0  # behind the latent, or where a head begins
    columns = slice(start, start + rows.rope.width)
    for old, new in zip(before, _all(rows), strict=True):
        for mine, theirs in zip(new, old, strict=True):
            assert torch.equal(_bits(mine[others]), _bits(theirs[others]))
        for mine, theirs in zip(new[1:], old[1:], strict=True):  # values
            assert torch.equal(_bits(mine[dst]), _bits(theirs[dst if in_place else src]))
        old_keys, new_keys = old[0][src], new[0][dst]
        still = torch.ones(old_keys.shape[-1], dtype=torch.bool)
        still[columns] = False
        assert torch.equal(_bits(old_keys[..., still]), _bits(new_keys[..., still]))
        stayed = shifts == 0
        assert torch.equal(_bits(old_keys[stayed]), _bits(new_keys[stayed]))
        exact = rotate_reference(old_keys, shifts, rows.rope, start)
        bound = rotary_bound(old_keys, exact, rows.rope, start)
        assert bool(((new_keys.double() - exact).abs() <= bound).all())
        assert not torch.equal(old_keys, new_keys)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POOLS)
def test_rows_are_copied_and_turned(name: str, dtype: torch.dtype, page: int) -> None:
    """I2, I3: scattered slots and whole pages, runs with and without a shift."""
    generator = fresh_generator()
    rows = _rows(name, dtype, page, generator)
    runs = [(20, -17), (13, 0), (30, 400), (1, -3000)]
    shifts = torch.cat([torch.full((n,), shift) for n, shift in runs])
    some = torch.randperm(rows.keys.slots, generator=generator)
    near = torch.arange(rows.keys.slots)
    for slots in (some, near):
        src, dst = slots[:64], slots[100:164]
        for given in (runs, shifts):
            before = _all(rows)
            rows.copy(src, dst, given)
            _check(rows, before, src, dst, shifts)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POOLS)
def test_rows_are_turned_where_they_are(name: str, dtype: torch.dtype, page: int) -> None:
    """I2, I3: in place, values and rows with shift 0 untouched."""
    generator = fresh_generator()
    rows = _rows(name, dtype, page, generator)
    runs = [(20, -17), (13, 0), (30, 400), (1, -3000)]
    shifts = torch.cat([torch.full((n,), shift) for n, shift in runs])
    slots = torch.randperm(rows.keys.slots, generator=generator)[:64]
    before = _all(rows)
    rows.turn(slots, runs)
    _check(rows, before, slots, slots, shifts, in_place=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POOLS)
def test_shift_0_is_bitwise(name: str, dtype: torch.dtype) -> None:
    """I2: whatever the bits say, signs of zeros, infinities and NaNs included."""
    generator = fresh_generator()
    rows = _rows(name, dtype, 1, generator)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(kind)
    for planes in (rows.keys, rows.values):
        for layer in planes.layers if planes else ():
            bits = torch.randint(info.min, info.max, layer.shape, generator=generator, dtype=kind)
            bits[::5] = info.min  # -0.0
            layer.copy_(bits.view(dtype))
    before = _all(rows)
    src, dst = torch.arange(10, 60), torch.arange(100, 150)
    rows.turn(src, [(50, 0)])
    rows.copy(src, dst, [(20, 0), (30, 0)])
    for old, new in zip(before, _all(rows), strict=True):
        for mine, theirs in zip(new, old, strict=True):
            assert torch.equal(_bits(mine[:100]), _bits(theirs[:100]))
            assert torch.equal(_bits(mine[dst]), _bits(theirs[src]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", POOLS)
def test_without_numba_the_same(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: torch and the compiled loop round alike."""
    found = []
    for missing in (False, True):
        if missing:
            monkeypatch.setattr(rotate, "_numba", lambda: None)
        rows = _rows(name, dtype, 1, torch.Generator().manual_seed(8))
        rows.copy(torch.arange(60), torch.arange(100, 160), [(59, 31), (1, 0)])
        rows.turn(torch.arange(20, 40), [(20, -7)])
        found.append(_all(rows))
    for one, other in zip(*found, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert torch.equal(_bits(mine), _bits(theirs))


@pytest.mark.parametrize("name", POOLS)
def test_zeros(name: str) -> None:
    rows = _rows(name, torch.bfloat16, 16, fresh_generator())
    slots = torch.tensor([3, 77, 160])
    before = _all(rows)
    rows.zero(slots)
    for old, new in zip(before, _all(rows), strict=True):
        for mine, theirs in zip(new, old, strict=True):
            assert not mine[slots].any()
            mine[slots] = theirs[slots]
            assert torch.equal(mine, theirs)


def test_read_is_what_sglang_reads() -> None:
    for name in POOLS:
        pool = _pool(name, torch.float32, 1)
        rows = Rows.of(pool, _model(name))
        for layer in range(LAYERS):
            for buffer in pool.get_kv_buffer(layer):
                buffer.copy_(torch.randn(buffer.shape))
        slots = torch.tensor([9, 2, 100])
        for layer, found in enumerate(rows.read(slots)):
            keys, values = pool.get_kv_buffer(layer)
            assert torch.equal(found[0], keys[slots])
            assert len(found) == 1 or torch.equal(found[1], values[slots])


def test_building_leaves_all_but_slot_0() -> None:
    """Kernels are compiled on the slot that SGLang pads with."""
    pool = _pool("mla", torch.float32, 1)
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.randn(buffer.shape))
    before = [buffer.clone() for buffer in pool.kv_buffer]
    Rows.of(pool, _model("mla"))
    for mine, theirs in zip(pool.kv_buffer, before, strict=True):
        assert torch.equal(mine[1:], theirs[1:])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(src=torch.arange(3)), "3 rows to 4 slots"),
        (dict(shifts=[(3, 1)]), "with 3 shifts"),
        (dict(shifts=torch.zeros(4)), "int64"),
        (dict(dst=torch.arange(4, dtype=torch.int32)), "int64"),
        (dict(src=torch.zeros(2, 2, dtype=torch.int64)), "one dimension"),
    ],
)
def test_bad_arguments_change_nothing(change: dict[str, Any], complaint: str) -> None:
    rows = _rows("mha", torch.float32, 1, fresh_generator())
    before = _all(rows)
    arguments: dict[str, Any] = dict(src=torch.arange(4), dst=torch.arange(8, 12), shifts=[(4, 2)])
    with pytest.raises(ValueError, match=complaint):
        rows.copy(**arguments | change)
    for old, new in zip(before, _all(rows), strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(new, old, strict=True))


def test_no_rows_is_nothing_to_do() -> None:
    rows = _rows("mha", torch.bfloat16, 1, fresh_generator())
    nothing = torch.zeros(0, dtype=torch.int64)
    rows.copy(nothing, nothing, [])
    rows.turn(nothing, nothing)
    assert all(not tensor.numel() for layer in rows.read(nothing) for tensor in layer)


# -- what is refused --------------------------------------------------------------------------


def _refused(pool: Any, model: nn.Module) -> str:
    with pytest.raises(Unsupported) as refused:
        Rows.of(pool, model)
    assert refused.value.reason == "unsupported_feature"
    return refused.value.message


def test_other_pools_are_refused() -> None:
    pool = _pool("mha", torch.bfloat16, 1)
    pool.__class__ = MHATokenToKVPoolFP4
    assert "MHATokenToKVPoolFP4" in _refused(pool, _model("mha"))


@pytest.mark.parametrize("name", ["mla", "mha"])
def test_narrow_dtypes_are_refused(name: str) -> None:
    pool = _pool(name, torch.float8_e4m3fn, 1)
    assert "float8_e4m3fn (--kv-cache-dtype)" in _refused(pool, _model(name))


@pytest.mark.parametrize(
    ("name", "attribute", "value", "word"),
    [
        ("mla", "use_dsa", True, "DSA"),
        ("mla", "kv_scale_buffer", [], "scales"),
        ("mla", "layer_shard_enabled", True, "sharded"),
        ("mha", "layer_shard_enabled", True, "sharded"),
        ("mha", "post_capture_active", True, "capture"),
        ("mha", "quant_method", object(), "quantized"),
        ("mha", "kv_cache_layout", "vectorized_5d", "vectorized_5d"),
    ],
)
def test_pools_with_more_than_rows_are_refused(
    name: str, attribute: str, value: object, word: str
) -> None:
    pool = _pool(name, torch.bfloat16, 1)
    setattr(pool, attribute, value)
    assert word in _refused(pool, _model(name))


def test_hnd_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert "SGLANG_USE_HND_KVCACHE" in _refused(_pool("mha", torch.bfloat16, 16), _model("mha"))


def test_pool_and_model_must_fit() -> None:
    pool = _pool("mha", torch.bfloat16, 1)
    assert "3 layers keep rows, but keys turn in 2" in _refused(pool, _model("mha", layers=2))
    wider = _model("mha", head_size=64)
    assert "32 of 64 columns turn, but rows have 32" in _refused(pool, wider)
    assert "12 of 12" in _refused(
        _pool("mla", torch.bfloat16, 1), _model("mla", head_size=12, rotary_dim=12)
    )


def test_it_says_what_it_is() -> None:
    rows = Rows.of(_pool("mla", torch.bfloat16, 1), _model("mla"))
    assert str(rows) == (
        "209 rows in 3 layers, torch.bfloat16, latents of 48 columns, 16 that turn (interleaved)"
    )

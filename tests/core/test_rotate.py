"""I2 and I3: rows turn by the model's rotation, rounded once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rotation_bounds import DTYPES, fresh_generator, rotary_bound, spec_of
from torch import Tensor
from transformers import DynamicCache

from leyline import rotate
from leyline.layout import ModelLayout, layout_of
from leyline.rope import RopeSpec
from leyline.rotate import (
    Planes,
    move_rows,
    rotate_reference,
    rotate_rows_,
    turn_unchecked,
)
from leyline.tiny import TINY, tiny_model

SHAPES = [  # columns, rotary width, first rotary column
    (64, 64, 0),
    (80, 32, 0),
    (96, 64, 32),
    (21, 8, 5),
]


def _cached(model: torch.nn.Module, tokens: Tensor) -> list[dict[str, Tensor]]:
    """Each layer's rows `[tokens, heads, columns]` after a prefill."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens[None], past_key_values=cache, use_cache=True)
    return [
        {"keys": layer.keys[0].transpose(0, 1), "values": layer.values[0].transpose(0, 1)}
        for layer in cache.layers
    ]


def _rotary_planes(
    rows: list[dict[str, Tensor]], layout: ModelLayout
) -> Iterator[tuple[int, str, Tensor]]:
    """Every layer's tensors as a stack of one plane."""
    for index, layer in enumerate(rows):
        for kind, tensor in layer.items():
            yield index, kind, tensor[None].clone()


def _check(before: Tensor, after: Tensor, deltas: int | Tensor, spec: RopeSpec, start: int) -> None:
    """I2, I3: `after` is R(delta) `before` within one rounding; unrotated columns bitwise."""
    still = torch.ones(before.shape[-1], dtype=torch.bool)
    still[start : start + spec.width] = False
    assert torch.equal(_bits(before[..., still]), _bits(after[..., still]))
    if isinstance(deltas, Tensor):
        deltas = deltas.expand(before.shape[:-2])
    exact = rotate_reference(before, deltas, spec, start)
    error = (after.double() - exact).abs()
    assert bool((error <= rotary_bound(before, exact, spec, start)).all())


def _bits(rows: Tensor) -> Tensor:
    kinds = {4: torch.int32, 2: torch.int16, 1: torch.int8}
    return rows.contiguous().view(kinds[rows.element_size()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TINY)
def test_every_architecture_layer_and_dtype(name: str, dtype: torch.dtype) -> None:
    """I2, I3: rows from the model's own cache, in place and moved."""
    generator = fresh_generator()
    model = tiny_model(name, dtype, seed=int(torch.randint(1000, (), generator=generator)))
    layout = layout_of(model)
    tokens = torch.randint(3, 500, (40,), generator=generator)
    deltas = torch.randint(-3000, 3000, (40,), generator=generator)
    for index, kind, planes in _rotary_planes(_cached(model, tokens), layout):
        layer = layout.layers[index]
        before = planes.clone()
        if layer.rotary_tensor != kind:
            move_rows(planes, slice(0, 30), slice(10, 40))
            assert torch.equal(_bits(planes[:, 10:]), _bits(before[:, :30]))
            continue
        assert layout.rope is not None
        start = layer.rotary_start
        rotate_rows_(planes, slice(0, 40), deltas, layout.rope, start)
        _check(before, planes, deltas, layout.rope, start)
        planes = before.clone()
        move_rows(planes, slice(0, 30), slice(10, 40), -555, layout.rope, start)
        _check(before[:, :30], planes[:, 10:], -555, layout.rope, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TINY)
def test_layer_0_is_what_a_fresh_prefill_gives(name: str, dtype: torch.dtype) -> None:
    """I3 against the truth: at layer 0 a key depends on its token and position alone.

    In the dtype's roundoff u, for a pair of length m: each prefill may round cos, sin, products and
    sum, at most 4 u m; the turn rounds once more and multiplies in fp32; and the model forms its
    angles in fp32, off by 2^-24 of the angle (and as much in cos and sin) each time.
    """
    generator = fresh_generator()
    model = tiny_model(name, dtype)
    layout = layout_of(model)
    rope, layer = layout.rope, layout.layers[0]
    assert rope is not None and layer.rotary_tensor is not None
    source = torch.randint(3, 500, (200,), generator=generator)
    target = torch.cat((source[:20], torch.randint(3, 500, (5,), generator=generator), source[90:]))
    planes = _cached(model, source)[0][layer.rotary_tensor][None].clone()
    fresh = _cached(model, target)[0][layer.rotary_tensor]
    rotate_rows_(planes, slice(90, 200), 25 - 90, rope, layer.rotary_start)
    kept, truth = planes[0, 90:].double(), fresh[25:].double()
    columns = slice(layer.rotary_start, layer.rotary_start + rope.width)
    still = torch.ones(kept.shape[-1], dtype=torch.bool)
    still[columns] = False
    assert torch.equal(kept[..., still], truth[..., still])
    pairs = rope.inv_freq.repeat_interleave(2) if rope.interleaved else rope.inv_freq.repeat(2)
    length = _lengths(truth[..., columns], rope)
    unit = torch.finfo(dtype).eps / 2
    bound = length * (9 * unit + 2.0**-24 * (3 + 2 * (200 * pairs + 2)))
    assert bool(((kept - truth)[..., columns].abs() <= bound + torch.finfo(dtype).tiny).all())


def _lengths(rows: Tensor, rope: RopeSpec) -> Tensor:
    if rope.interleaved:
        return torch.hypot(rows[..., 0::2], rows[..., 1::2]).repeat_interleave(2, dim=-1)
    low, high = rows.chunk(2, dim=-1)
    return torch.hypot(low, high).repeat(*[1] * (rows.dim() - 1), 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "width", "start"), SHAPES)
def test_slots_and_deltas_of_every_kind(
    columns: int, width: int, start: int, dtype: torch.dtype, interleaved: bool
) -> None:
    """I2, I3: runs and strays, one delta or many; other slots stay bitwise."""
    generator = fresh_generator()
    spec = spec_of(width, interleaved)
    planes = torch.randn(3, 400, 2, columns, generator=generator).to(dtype)
    shuffled = torch.randperm(400, generator=generator)
    runs = torch.cat((torch.arange(300, 390), torch.arange(20, 120)))
    for slots in (slice(7, 250), slice(0, 0), runs, shuffled[:150], shuffled[:1]):
        rows = torch.arange(400)[slots]
        coarse = torch.randint(-2, 3, (len(rows),), generator=generator).sort().values * 700
        single = torch.randint(-(10**6), 10**6, (len(rows),), generator=generator)
        for deltas in (-123, 0, coarse, single):
            turned = planes.clone()
            rotate_rows_(turned, slots, deltas, spec, start)
            _check(planes[:, rows], turned[:, rows], deltas, spec, start)
            others = torch.ones(400, dtype=torch.bool)
            others[rows] = False
            assert torch.equal(_bits(turned[:, others]), _bits(planes[:, others]))


@given(st.integers(1, 60), st.integers(0, 2**31), st.booleans(), st.sampled_from(DTYPES))
def test_moves_read_before_they_write(
    n: int, seed: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """I2, I3: random source and target slots, overlapping or not."""
    generator = torch.Generator().manual_seed(seed)
    spec = spec_of(16, interleaved)
    planes = torch.randn(2, 60, 2, 24, generator=generator).to(dtype)
    src = torch.randperm(60, generator=generator)[:n]
    dst = torch.randperm(60, generator=generator)[:n]
    if seed % 3 == 0:  # neighbours, shifted
        src = torch.arange(60 - n, 60)
        dst = torch.arange(0, n) if seed % 2 else src
    deltas = torch.randint(-2, 3, (n,), generator=generator) * 10
    moved = planes.clone()
    move_rows(moved, src, dst, deltas, spec, 4)
    _check(planes[:, src], moved[:, dst], deltas, spec, 4)
    others = torch.ones(60, dtype=torch.bool)
    others[dst] = False
    assert torch.equal(_bits(moved[:, others]), _bits(planes[:, others]))


@pytest.mark.parametrize("slots", [slice(0, 50), torch.arange(50).flip(0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_do_not_turn_are_bitwise(dtype: torch.dtype, slots: slice | Tensor) -> None:
    """I2: delta 0 makes no trip through fp32: signs of zeros, NaNs and infinities stay."""
    generator = fresh_generator()
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(kind)
    bits = torch.randint(info.min, info.max, (2, 100, 2, 32), generator=generator, dtype=kind)
    bits[:, ::7] = info.min  # -0.0
    planes = bits.view(dtype)
    deltas = torch.zeros(50, dtype=torch.int64)
    for spec in (spec_of(32, True), spec_of(32, False)):
        rotate_rows_(planes, slots, deltas, spec)
        rotate_rows_(planes, slots, 0, spec)
        assert torch.equal(planes.view(kind), bits)
        target = torch.arange(50, 100)
        moved = planes.clone()
        move_rows(moved, slots, target, deltas, spec)
        assert torch.equal(moved.view(kind)[:, 50:], bits[:, slots])


def test_copies_without_rotation_take_any_dtype() -> None:
    """I2: planes that hold no rotary columns are moved byte for byte."""
    generator = fresh_generator()
    for dtype in (torch.int8, torch.uint8, torch.int64, torch.bool):
        planes = torch.randint(0, 2, (2, 40, 3, 7), generator=generator).to(dtype)
        moved = planes.clone()
        move_rows(moved, slice(0, 30), slice(5, 35))
        assert torch.equal(moved[:, 5:35], planes[:, :30])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations_compose(dtype: torch.dtype, interleaved: bool) -> None:
    """I3: R(a) R(b) = R(a + b) and R(-a) undoes R(a), within the roundings that were made.

    The second turn carries the first one's error along (it keeps lengths: at most sqrt 2 of the
    larger error of a pair) and adds its own.
    """
    generator = fresh_generator()
    spec = spec_of(64, interleaved)
    planes = torch.randn(2, 80, 2, 64, generator=generator).to(dtype)
    once = planes.clone()
    rotate_rows_(once, slice(0, 80), 811, spec)
    for second, total in ((-300, 511), (-811, 0)):
        twice = once.clone()
        rotate_rows_(twice, slice(0, 80), second, spec)
        exact = rotate_reference(planes, total, spec)
        unit = max(torch.finfo(dtype).eps / 2, 3.01 * 2.0**-24)
        length = _lengths(planes.double(), spec)
        bound = 3.1 * (unit + 3.01 * 2.0**-24) * length + torch.finfo(dtype).tiny
        assert bool(((twice.double() - exact).abs() <= bound).all())
        assert not torch.equal(twice, once)


def test_planes_may_be_views() -> None:
    """Every second layer, slots within a larger pool, columns within a wider row."""
    generator = fresh_generator()
    whole = torch.randn(6, 90, 2, 100, generator=generator)
    before = whole.clone()
    view = whole[::2, 10:80, :, 3:67]
    for slots in (slice(0, 50), torch.arange(0, 70, 2)):
        whole.copy_(before)
        for spec in (spec_of(64, False), spec_of(64, True)):
            whole.copy_(before)
            rotate_rows_(view, slots, 9, spec)
            _check(before[::2, 10:80, :, 3:67][:, slots], view[:, slots], 9, spec, 0)
            assert torch.equal(whole[1::2], before[1::2])
            assert torch.equal(whole[..., :3], before[..., :3])
            assert torch.equal(whole[..., 67:], before[..., 67:])


@pytest.mark.parametrize("compiled", [True, False], ids=["numba", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_their_own(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2, I3: a tensor for each layer, stacked or not, compiled or not: the same bits."""
    generator = fresh_generator()
    whole = torch.randn(3, 300, 2, 24, generator=generator).to(dtype)
    some = torch.randperm(300, generator=generator)
    src, dst = some[:120], some[120:240]
    deltas = torch.randint(-2, 3, (120,), generator=generator) * 700
    for spec in (spec_of(16, True), spec_of(16, False)):
        expected = whole.clone()
        move_rows(expected, src, dst, deltas, spec, 4)
        rotate_rows_(expected, src, deltas, spec, 4)
        _check(whole[:, src], expected[:, dst], deltas, spec, 4)
        layers = [layer.clone() for layer in whole]
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(rotate, "_numba", lambda: None)
            move_rows(layers, src, dst, deltas, spec, 4)
            planes = Planes.of(layers)
            turn_unchecked(planes, src, src, deltas, spec, 4)
        assert torch.equal(_bits(torch.stack(layers)), _bits(expected))
        assert planes.offsets.tolist() == [
            (layer.data_ptr() - layers[0].data_ptr()) // (dtype.itemsize * planes.unit)
            for layer in layers
        ]


def test_layers_must_be_alike() -> None:
    """What one layer's strides say must hold for all."""
    one = torch.zeros(10, 2, 8)
    for other in (
        torch.zeros(11, 2, 8),
        torch.zeros(10, 2, 8, dtype=torch.float16),
        torch.zeros(10, 8, 2).transpose(1, 2),
        torch.zeros(10, 16),
    ):
        with pytest.raises(ValueError, match="one as the other"):
            rotate_rows_([one, other], slice(0, 5), 3, spec_of(8, False))
    with pytest.raises(ValueError, match="none"):
        Planes.of([])
    assert not one.any()


def test_works_on_tensors_of_inference_mode_and_outside() -> None:
    with torch.inference_mode():
        planes = torch.randn(1, 8, 1, 8)
    before = planes.clone()
    rotate_rows_(planes, slice(0, 8), 3, spec_of(8, False))
    _check(before, planes, 3, spec_of(8, False), 0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(slots=slice(0, 11)), "10 slots"),
        (dict(slots=slice(0, 8, 2)), "plain range"),
        (dict(slots=torch.tensor([3, 10])), "of 10"),
        (dict(slots=torch.tensor([-1])), "of 10"),
        (dict(slots=torch.tensor([1], dtype=torch.int32)), "int64"),
        (dict(deltas=torch.tensor([1, 2])), "one a row"),
        (dict(start=1), "don't fit"),
        (dict(start=-1), "don't fit"),
        (dict(planes=torch.zeros(10, 2, 8)), "layers, slots"),
        (dict(planes=torch.zeros(1, 10, 2, 8, dtype=torch.float64)), "float64"),
        (dict(planes=torch.zeros(1, 10, 8, 2).transpose(2, 3)), "contiguous"),
    ],
)
def test_bad_arguments_change_nothing(change: dict, complaint: str) -> None:
    arguments: dict = dict(
        planes=torch.ones(1, 10, 2, 8), slots=slice(0, 5), deltas=3, spec=spec_of(8, False), start=0
    )
    arguments.update(change)
    before = arguments["planes"].clone()
    with pytest.raises(ValueError, match=complaint):
        rotate_rows_(**arguments)
    assert torch.equal(arguments["planes"], before)


def test_bad_moves_are_refused() -> None:
    planes = torch.ones(1, 10, 2, 8)
    with pytest.raises(ValueError, match="5 source slots but 4 target"):
        move_rows(planes, slice(0, 5), slice(5, 9))
    with pytest.raises(ValueError, match="RopeSpec"):
        move_rows(planes, slice(0, 5), slice(5, 10), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_enough_for_several_threads(dtype: torch.dtype, interleaved: bool) -> None:
    """I2, I3: the compiled loop shares rows out between threads; each is turned once."""
    generator = fresh_generator()
    spec = spec_of(16, interleaved)
    planes = torch.randn(3, 40_000, 1, 24, generator=generator).to(dtype)
    before = planes.clone()
    slots = torch.randperm(40_000, generator=generator)[:30_000].sort().values
    deltas = torch.randint(-2, 3, (30_000,), generator=generator) * 100
    rotate_rows_(planes, slots, deltas, spec, 4)
    _check(before[:, slots], planes[:, slots], deltas, spec, 4)
    others = torch.ones(40_000, dtype=torch.bool)
    others[slots] = False
    assert torch.equal(_bits(planes[:, others]), _bits(before[:, others]))

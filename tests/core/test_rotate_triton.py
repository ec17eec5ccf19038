"""I2 and I3 for the CUDA kernel, run by Triton's interpreter where no GPU is there.

The interpreter is chosen when Triton is imported, so these tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leyline.rope import RopeSpec
from leyline.rotate import Planes

pytest.importorskip("triton")


@pytest.mark.parametrize("interleaved", ["interleaved", "halves"])
def test_kernel(interleaved: str) -> None:
    """I2, I3: in place, moved and copied, in every dtype, layers stacked or anywhere in memory."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, __file__, interleaved],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("all right")


SLOTS, MOVED = 20, 9
COPY, IN_PLACE = True, False
LATENT = dict(HEADS=1, COLUMNS=576, START=512, HALF=32, INTERLEAVED=True, LEFT=512, RIGHT=1)
HEADS = dict(HEADS=8, COLUMNS=128, START=0, HALF=64, INTERLEAVED=False, LEFT=1, RIGHT=1)
VALUES = dict(HEADS=1, COLUMNS=1024, START=1024, HALF=0, INTERLEAVED=False, LEFT=1024, RIGHT=1)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("shape", "copy", "items"),
    [
        (LATENT, COPY, 4),
        (LATENT, IN_PLACE, 32),
        (HEADS, COPY, 16),
        (HEADS, IN_PLACE, 16),
        (VALUES, COPY, 2),
    ],
    ids=["latents", "latents in place", "keys", "keys in place", "values"],
)
def test_kernel_compiles_for_a_gpu(
    shape: dict[str, int], copy: bool, items: int, capability: int
) -> None:
    """Without a GPU: rows of bf16 go in pieces of 16 bytes, and no thread needs another's."""
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from leyline.rotate_triton import _turn_kernel

    if "nvidia" not in backends or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this Triton compiles for no NVIDIA GPU")
    pairs = max(1, shape["HALF"])
    constants = shape | dict(COPY=copy, SOURCE_UNIT=16, TARGET_UNIT=16, ITEMS=items, PAIRS=pairs)
    types = dict(source="*bf16", target="*bf16", tables="*i32", cos_sin="*fp32", rows="i32")
    types |= dict.fromkeys(("source_layers", "target_layers", "src_slots", "dst_slots"), "*i64")
    names = _turn_kernel.arg_names
    unaligned = ("rows", "src_slots", "dst_slots")
    source = ASTSource(
        fn=_turn_kernel,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in constants and name not in unaligned
        },
    )
    code = compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert "ld.global.v4.b32" in code and "st.global.v4.b32" in code
    assert "st.global.b16" not in code and "shfl" not in code and ".shared" not in code


def _main(interleaved: bool) -> None:
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = fresh_generator()
    for dtype in DTYPES:
        for columns, width, start in ((64, 64, 0), (80, 32, 0), (96, 64, 32), (21, 8, 5)):
            spec = spec_of(width, interleaved)
            rows = torch.randn(3, SLOTS, 2, columns, generator=generator).to(dtype)
            rows[:, :, :, ::5] *= -0.0
            for planes in (_stacked, _scattered, _unaligned):
                _check_all(rows, lambda r, p=planes: p(r, device), spec, start, generator)
    print("all right")


def _stacked(rows: Tensor, device: str) -> Planes:
    return Planes.of(rows.clone().to(device))


def _scattered(rows: Tensor, device: str) -> Planes:
    """Layers wherever the allocator put them, in any order."""
    layers = [layer.clone().to(device) for layer in rows.flip(0)]
    return Planes.of(layers[::-1])


def _unaligned(rows: Tensor, device: str) -> Planes:
    """Layers that begin within other memory, an odd number of elements on."""
    layers = []
    for i, layer in enumerate(rows):
        memory = torch.zeros(layer.numel() + 16, dtype=rows.dtype, device=device)
        layers.append(memory[2 * i + 1 :][: layer.numel()].view(layer.shape))
        layers[-1].copy_(layer)
    return Planes.of(layers)


def _check_all(
    rows: Tensor,
    planes_of: Callable[[Tensor], Planes],
    spec: RopeSpec,
    start: int,
    generator: torch.Generator,
) -> None:
    """In place, from slot to slot, by way of a buffer, and plain copies."""
    some = torch.randperm(SLOTS, generator=generator)
    src, dst = some[:MOVED], some[MOVED : 2 * MOVED]
    near = torch.arange(2, 2 + MOVED)
    for deltas in (
        torch.randint(-2, 3, (MOVED,), generator=generator) * 700,
        torch.full((MOVED,), -31),
        torch.zeros(MOVED, dtype=torch.int64),
    ):
        for old, new in ((src, src), (src, dst), (near, near + MOVED)):
            planes = planes_of(rows)
            device = planes.device
            at = old.to(device)
            turn_rows(planes, at, at if new is old else new.to(device), deltas, spec, start)
            _compare(rows, planes, old, new, deltas, spec, start)
        planes = planes_of(rows)
        buffer = Planes.of(torch.zeros_like(rows[:, :MOVED]).to(device))
        order = torch.arange(MOVED, device=device)
        turn_rows(planes, near.to(device), order, deltas, spec, start, target=buffer)
        turn_rows(buffer, order, near.to(device) - 2, deltas * 0, None, 0, target=planes)
        _compare(rows, planes, near, near - 2, deltas, spec, start)
    planes = planes_of(rows)
    turn_rows(planes, src.to(device), dst.to(device), torch.zeros_like(deltas), None, 0)
    _compare(rows, planes, src, dst, torch.zeros_like(deltas), spec, start)


def _compare(
    rows: Tensor, planes: Planes, old: Tensor, new: Tensor, deltas: Tensor, spec: RopeSpec, at: int
) -> None:
    after = torch.stack([layer.cpu() for layer in planes.layers])
    _check(rows[:, old], after[:, new], deltas, spec, at)
    stayed = deltas == 0
    assert torch.equal(_bits(after[:, new[stayed]]), _bits(rows[:, old[stayed]]))
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[new] = False
    assert torch.equal(_bits(after[:, others]), _bits(rows[:, others]))


if __name__ == "__main__":
    from rotation_bounds import DTYPES, fresh_generator, spec_of
    from test_rotate import _bits, _check

    from leyline.rotate_triton import turn_rows

    _main(sys.argv[1] == "interleaved")

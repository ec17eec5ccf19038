"""Rows on a GPU: are they right, and how fast are they copied and turned?

    PYTHONPATH=src python scripts/gpu_rows.py --json rows.json

Needs torch, Triton and a GPU with 24 GiB; takes under three minutes. All checks come first: rows
against an fp64 rotation, everything else bit by bit, and no call may wait for the device. Then the
rows of two models are timed as SGLang keeps them, a tensor for each layer: from slot to slot, and
in place. Speeds are told as a fraction of what `copy_` of as many bytes reaches on the same GPU;
bytes read and bytes written both count. The goal is 0.8.

--cpu-check runs the checks on a CPU, in Triton's interpreter, with small shapes.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

CPU_CHECK = "--cpu-check" in sys.argv
if CPU_CHECK:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
from torch import Tensor

from leyline import rotate_triton
from leyline.rope import RopeSpec
from leyline.rotate import Planes, move_rows, rotate_reference, rotate_rows_, turn_unchecked

GOAL = 0.8
SECONDS = 150.0
"""When no further tile size is tried."""
ROWS = (1024, 4096, 16384, 65536, 131072)
LARGEST = 1 << 30
"""Bytes that `copy_` is timed with at most; it gets no faster."""
DEVICE = torch.device("cpu" if CPU_CHECK else "cuda")


@dataclass(frozen=True)
class Shape:
    """One model's rows. values: heads x columns of a row of values, if it keeps any."""

    name: str
    layers: int
    heads: int
    columns: int
    start: int
    width: int
    interleaved: bool
    values: tuple[int, int] | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def spec(self) -> RopeSpec:
        powers = torch.arange(0, self.width, 2, dtype=torch.float64) / self.width
        return RopeSpec((10000.0**-powers).float().double(), self.width, self.interleaved)

    @property
    def row_bytes(self) -> int:
        """Of one token in one layer."""
        values = self.values[0] * self.values[1] if self.values else 0
        return (self.heads * self.columns + values) * self.dtype.itemsize

    @property
    def turning_bytes(self) -> int:
        return self.heads * self.width * self.dtype.itemsize


LITE = Shape("DeepSeek-V2-Lite", 27, 1, 576, 512, 64, True)
GQA = Shape("GQA 8 x 128", 32, 8, 128, 0, 128, False, (8, 128))
CHECKED = (
    LITE,
    Shape("DeepSeek, halves, fp16", 3, 1, 576, 512, 64, False, None, torch.float16),
    Shape("DeepSeek, fp32", 3, 1, 576, 512, 64, True, None, torch.float32),
    GQA,
    Shape("GQA 2 x 96, 24 turn, fp16", 3, 2, 96, 0, 24, True, (2, 80), torch.float16),
    Shape("MHA 5 x 80, fp32", 3, 5, 80, 0, 80, False, (5, 80), torch.float32),
)
SMALL = (
    Shape("latent", 2, 1, 80, 64, 16, True),
    Shape("latent, halves, fp16", 2, 1, 80, 64, 16, False, None, torch.float16),
    Shape("GQA, part turns, fp32", 2, 2, 24, 0, 8, True, (2, 20), torch.float32),
)


class Pool:
    """Random rows as SGLang keeps them: a tensor for each layer, keys and values of one shape being
    halves of one."""

    def __init__(self, shape: Shape, slots: int) -> None:
        self.shape = shape
        keys, values = [], []
        for _ in range(shape.layers):
            k = (slots, shape.heads, shape.columns)
            if shape.values == (shape.heads, shape.columns):
                both = _random((2, *k), shape.dtype)
                keys.append(both[0])
                values.append(both[1])
                continue
            keys.append(_random(k, shape.dtype))
            if shape.values:
                values.append(_random((slots, *shape.values), shape.dtype))
        self.keys = Planes.of(keys)
        self.values = Planes.of(values) if values else None
        for planes in (self.keys, self.values):
            assert planes is None or planes.offsets.numel() == shape.layers  # sent once

    def copy(self, src: Tensor, dst: Tensor, deltas: Tensor) -> None:
        turn = rotate_triton.turn_rows if CPU_CHECK else turn_unchecked
        turn(self.keys, src, dst, deltas, self.shape.spec, self.shape.start)
        if self.values is not None:
            turn(self.values, src, dst, torch.zeros_like(deltas), None, 0)

    def turn(self, slots: Tensor, deltas: Tensor) -> None:
        turn = rotate_triton.turn_rows if CPU_CHECK else turn_unchecked
        turn(self.keys, slots, slots, deltas, self.shape.spec, self.shape.start)

    def on_host(self) -> tuple[Tensor, Tensor | None]:
        """All rows `[layers, slots, heads, columns]`."""
        keys = torch.stack([layer.cpu() for layer in self.keys.layers])
        if self.values is None:
            return keys, None
        return keys, torch.stack([layer.cpu() for layer in self.values.layers])


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_()


# -- checks -----------------------------------------------------------------------------------


def check(shape: Shape, rows: int) -> list[str]:
    """What is wrong; nothing, if all is well."""
    wrong = []
    slots = 3 * rows
    runs = [rows // 2, rows // 4, rows - rows // 2 - rows // 4]
    deltas = torch.repeat_interleave(torch.tensor([-480, 0, 100_003]), torch.tensor(runs))
    each = torch.randint(-(10**5), 10**5, (rows,))
    scattered = torch.randperm(slots)
    for layout, order in (("contiguous", torch.arange(slots)), ("scattered", scattered)):
        src, dst = order[:rows], order[rows : 2 * rows]
        for kind, shifts in (("runs", deltas), ("one each", each)):
            for way in ("copy", "in place"):
                pool = Pool(shape, slots)
                before = pool.on_host()
                at, to = src.to(DEVICE), dst.to(DEVICE)
                _forbid_waiting(True)
                try:
                    pool.copy(at, to, shifts) if way == "copy" else pool.turn(at, shifts)
                except RuntimeError as error:
                    wrong.append(f"{shape.name}, {layout}, {kind}, {way}: {error}")
                    continue
                finally:
                    _forbid_waiting(False)
                target = dst if way == "copy" else src
                found = _compare(shape, before, pool.on_host(), src, target, shifts)
                wrong += [f"{shape.name}, {layout}, {kind}, {way}: {fault}" for fault in found]
    return wrong + _check_public(shape, rows)


def _forbid_waiting(on: bool) -> None:
    """Whether torch raises when it waits for the device."""
    if not CPU_CHECK:
        torch.cuda.set_sync_debug_mode("error" if on else "default")


def _check_public(shape: Shape, rows: int) -> list[str]:
    """`move_rows` where slots overlap, `rotate_rows_`, and rows in one tensor."""
    wrong = []
    for stacked in (False, True):
        pool = Pool(shape, 2 * rows)
        before, _ = pool.on_host()
        layers = list(pool.keys.layers)
        planes = torch.stack(layers) if stacked else layers
        src, dst = torch.arange(rows), torch.arange(rows // 2, rows // 2 + rows)
        move_rows(planes, src.to(DEVICE), dst.to(DEVICE), 7, shape.spec, shape.start)
        rotate_rows_(planes, slice(0, rows // 2), -7, shape.spec, shape.start)
        after = torch.stack([layer.cpu() for layer in planes])
        shifts = torch.full((rows,), 7)
        expected = (before, None), (after, None)
        half = torch.arange(rows // 2)
        found = _compare(shape, *expected, src, dst, shifts, others=False)
        found += _compare(shape, *expected, half, half, -shifts[: rows // 2], others=False)
        wrong += [f"{shape.name}, public, stacked {stacked}: {fault}" for fault in found]
    return wrong


def _compare(
    shape: Shape,
    before: tuple[Tensor, Tensor | None],
    after: tuple[Tensor, Tensor | None],
    src: Tensor,
    dst: Tensor,
    shifts: Tensor,
    others: bool = True,
) -> list[str]:
    faults = []
    untouched = torch.ones(before[0].shape[1], dtype=torch.bool)
    untouched[dst] = False
    old, new = before[0][:, src], after[0][:, dst]
    still = torch.ones(shape.columns, dtype=torch.bool)
    still[shape.start : shape.start + shape.width] = False
    if not _same(old[..., still], new[..., still]):
        faults.append("columns that don't turn have changed")
    if not _same(old[:, shifts == 0], new[:, shifts == 0]):
        faults.append("rows with shift 0 have changed")
    if others and not _same(before[0][:, untouched], after[0][:, untouched]):
        faults.append("other rows have changed")
    if before[1] is not None and after[1] is not None:
        if not _same(before[1][:, src], after[1][:, dst]):
            faults.append("values have changed")
        if not _same(before[1][:, untouched], after[1][:, untouched]):
            faults.append("other values have changed")
    for layer in range(shape.layers):
        exact = rotate_reference(old[layer], shifts, shape.spec, shape.start)
        over = (new[layer].double() - exact).abs() - _bound(shape, old[layer], exact)
        wrong = ~(over <= 0)  # also what is no number
        if bool(wrong.any()):
            faults.append(
                f"layer {layer}: {int(wrong.sum())} elements off by more than one rounding"
            )
            break
    return faults


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _bound(shape: Shape, rows: Tensor, exact: Tensor) -> Tensor:
    """cos, sin, two products and a sum in fp32, then one rounding to the dtype."""
    inside = slice(shape.start, shape.start + shape.width)
    pairs = rows[..., inside].double()
    if shape.interleaved:
        length = torch.hypot(pairs[..., 0::2], pairs[..., 1::2]).repeat_interleave(2, dim=-1)
    else:
        low, high = pairs.chunk(2, dim=-1)
        length = torch.hypot(low, high).repeat(1, 1, 2)
    bound = torch.zeros(rows.shape, dtype=torch.float64)
    bound[..., inside] = 3.01 * 2.0**-24 * length + 2.0**-149
    if shape.dtype != torch.float32:
        info = torch.finfo(shape.dtype)
        result = exact[..., inside].abs() + bound[..., inside]
        bound[..., inside] += info.eps / 2 * result + info.smallest_normal * info.eps / 2
    return bound


# -- speed ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """One measurement. us: on the device; call_us: until a call returns to its caller."""

    shape: str
    way: str  # "copy" or "in place"
    slots: str  # "contiguous" or "scattered"
    rows: int
    megabytes: float
    us: float
    copy_us: float
    call_us: float
    tile: int
    warps: int

    @property
    def ratio(self) -> float:
        return self.copy_us / self.us


def time_shape(shape: Shape, say: Callable[[Timing], None]) -> list[Timing]:
    most = _most_rows(shape)
    sizes = [rows for rows in ROWS if rows <= most]
    if not sizes:
        print(f"{shape.name}: too little memory is free to time {ROWS[0]} rows")
        return []
    pool = Pool(shape, 2 * sizes[-1] + 1)
    found = []
    for rows in sizes:
        for slots in ("contiguous", "scattered"):
            for way in ("copy", "in place"):
                found.append(_time(pool, rows, slots, way))
                say(found[-1])
    del pool
    torch.cuda.empty_cache()
    return found


def try_tiles(shape: Shape, until: float, say: Callable[[Timing], None]) -> list[Timing]:
    """Other sizes of what a program holds, at 16384 scattered rows."""
    rows = 16384
    pool = Pool(shape, 2 * rows + 1)
    usual = rotate_triton.TILE, rotate_triton.WARPS
    found = []
    for tile in (1024, 2048, 4096, 8192):
        for warps in (4, 8):
            for way in ("copy", "in place"):
                if time.monotonic() > until or (tile, warps) == usual:
                    continue
                rotate_triton.TILE, rotate_triton.WARPS = tile, warps
                found.append(_time(pool, rows, "scattered", way))
                say(found[-1])
    rotate_triton.TILE, rotate_triton.WARPS = usual
    return found


def _most_rows(shape: Shape) -> int:
    """That fit twice into most of what is free, beside the buffers of `copy_`."""
    free, _ = torch.cuda.mem_get_info()
    return int((0.9 * free - 2 * LARGEST) / (2 * shape.layers * shape.row_bytes))


def _time(pool: Pool, rows: int, slots: str, way: str) -> Timing:
    shape, spec = pool.shape, pool.shape.spec
    order = torch.arange(2 * rows) if slots == "contiguous" else torch.randperm(2 * rows)
    order = order.to(DEVICE) + 1
    src, dst = order[:rows].contiguous(), order[rows:].contiguous()
    deltas = torch.full((rows,), -480)
    turns = rotate_triton.Turns.of(deltas, spec, DEVICE)
    plain = rotate_triton.Turns.of(deltas, None, DEVICE)

    def copy() -> None:
        keys, values = pool.keys, pool.values
        rotate_triton.launch(keys, keys, src, dst, turns, spec, shape.start, copy=True)
        if values is not None:
            rotate_triton.launch(values, values, src, dst, plain, None, 0, copy=True)

    def in_place() -> None:
        keys = pool.keys
        rotate_triton.launch(keys, keys, src, src, turns, spec, shape.start, copy=False)

    size = rows * shape.layers * (shape.row_bytes if way == "copy" else shape.turning_bytes)
    here = _random((min(size, LARGEST) // 2,), torch.bfloat16)
    there = torch.empty_like(here)
    work = copy if way == "copy" else in_place
    call = (
        (lambda: pool.copy(src, dst, deltas)) if way == "copy" else (lambda: pool.turn(src, deltas))
    )
    us, copy_us = _device_us({"rows": work, "copy_": lambda: there.copy_(here)})
    return Timing(
        shape.name,
        way,
        slots,
        rows,
        2 * size / 1e6,
        us,
        copy_us * size / (2 * here.numel()),
        _call_us(call),
        rotate_triton.TILE,
        rotate_triton.WARPS,
    )


def _device_us(ways: dict[str, Callable[[], object]]) -> list[float]:
    """Median microseconds of each on the device, taken in turns."""
    runs = {}
    for name, work in ways.items():
        work()  # compiles
        torch.cuda.synchronize()
        once = _events(work)
        repeats = max(1, min(50, int(2000 / max(once, 1.0))))
        runs[name] = _graph(work, repeats), repeats
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(7):
        for name, (run, repeats) in runs.items():
            times[name].append(_events(run) / repeats)
    return [sorted(each)[len(each) // 2] for each in times.values()]


def _graph(work: Callable[[], object], repeats: int) -> Callable[[], object]:
    """`work`, several times over, without the host in between."""

    def again() -> None:
        for _ in range(repeats):
            work()

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again()
        graph.replay()
        return graph.replay
    except RuntimeError as error:
        print(f"timed without a graph: {error}", file=sys.stderr)
        torch.cuda.synchronize()
        return again


def _events(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def _call_us(call: Callable[[], object], times: int = 20) -> float:
    """Median microseconds until a call returns; the device is idle and catches up later."""
    call()
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return sorted(found)[times // 2]


def _line(timing: Timing) -> str:
    gbs = timing.megabytes / timing.us * 1e3
    return (
        f"{timing.shape:<17} {timing.way:<9} {timing.slots:<10} {timing.rows:>7} "
        f"{timing.megabytes:>9.1f} {timing.us:>9.1f} {gbs:>7.0f} {timing.ratio:>6.2f} "
        f"{timing.call_us:>8.0f} {timing.tile:>5} {timing.warps:>5}"
    )


# -- all of it --------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--cpu-check", action="store_true", help="checks only, without a GPU")
    options = parser.parse_args()
    began = time.monotonic()
    print(f"seed {options.seed}")
    torch.manual_seed(options.seed)
    wrong: list[str] = []
    for shape in SMALL if CPU_CHECK else CHECKED:
        found = check(shape, 40 if CPU_CHECK else 400)
        print(f"{'wrong' if found else 'right'}: {shape.name}", flush=True)
        wrong += found
    for fault in wrong:
        print(f"  {fault}")
    report = {
        "checks": "failed" if wrong else "passed",
        "faults": wrong,
        "torch": torch.__version__,
        "triton": rotate_triton.triton.__version__,
    }
    if not CPU_CHECK and not wrong:
        report |= _measure(began)
    print(f"{time.monotonic() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 1 if wrong else 0


def _measure(began: float) -> dict[str, object]:
    name = torch.cuda.get_device_name()
    print(f"\n{name}\nof copy_: bandwidth as a fraction of copy_'s, goal {GOAL}\n")
    print(
        f"{'rows of':<17} {'way':<9} {'slots':<10} {'rows':>7} {'MB':>9} {'us':>9} {'GB/s':>7} "
        f"{'copy_':>6} {'call us':>8} {'tile':>5} {'warps':>5}"
    )

    def say(timing: Timing) -> None:
        print(_line(timing), flush=True)

    timings = [timing for shape in (LITE, GQA) for timing in time_shape(shape, say)]
    print("\nother tiles")
    tiles = [t for shape in (LITE, GQA) for t in try_tiles(shape, began + SECONDS, say)]
    least = min((t.ratio for t in timings if t.rows >= 16384), default=float("nan"))
    print(f"\nleast of copy_ from 16384 rows on: {least:.2f}")
    return {
        "gpu": name,
        "timings": [asdict(t) | {"ratio": t.ratio} for t in timings],
        "tiles": [asdict(t) | {"ratio": t.ratio} for t in tiles],
    }


if __name__ == "__main__":
    sys.exit(main())

"""The rows themselves: per layer one plane of keys and one of values, `[slots, heads, dim]`.

Layers of one shape lie in one tensor `[layers, slots, heads, dim]`, so that a splice handles all
of them in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from leyline.engine.slots import Slots
from leyline.layout import ModelLayout
from leyline.rope import RopeSpec
from leyline.rotate import move_rows, rotate_rows_


@dataclass(frozen=True, eq=False)
class Stack:
    """Planes of one kind and shape; `rope` is None where nothing rotates."""

    kind: Literal["keys", "values"]
    rows: Tensor
    layers: tuple[int, ...]
    rope: RopeSpec | None
    rotary_start: int


class Planes:
    """All rows of all layers."""

    def __init__(
        self, layout: ModelLayout, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = capacity
        self.stacks = list(_stacks(layout, capacity, dtype, device))
        self.keys: list[Tensor] = [torch.empty(0)] * len(layout.layers)
        self.values: list[Tensor] = [torch.empty(0)] * len(layout.layers)
        for stack in self.stacks:
            planes = self.keys if stack.kind == "keys" else self.values
            for i, layer in enumerate(stack.layers):
                planes[layer] = stack.rows[i]
        self.rotate(np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64))  # compiles; 0 stays 0

    def rotate(self, slots: Slots, shifts: Slots) -> None:
        """Turn the rotary columns of `slots` in place, row i by `shifts[i]` tokens."""
        device = self.keys[0].device
        where, by = torch.from_numpy(slots).to(device), torch.from_numpy(shifts).to(device)
        for stack in self.stacks:
            if stack.rope is not None:
                rotate_rows_(stack.rows, where, by, stack.rope, stack.rotary_start)

    def copy(self, source: Slots, target: Slots, shifts: Slots) -> None:
        """Copy rows `source` to `target`, turned on the way by `shifts` tokens."""
        device = self.keys[0].device
        src, dst = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
        by = torch.from_numpy(shifts).to(device)
        for stack in self.stacks:
            shift = 0 if stack.rope is None else by
            move_rows(stack.rows, src, dst, shift, stack.rope, stack.rotary_start)

    def zero(self, slots: Slots) -> None:
        """Overwrite rows with zeros."""
        where = torch.from_numpy(slots).to(self.keys[0].device)
        for stack in self.stacks:
            stack.rows.index_fill_(1, where, 0)


def _stacks(
    layout: ModelLayout, capacity: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Stack]:
    """Group the layers' tensors by kind, shape and rotary columns."""
    groups: dict[tuple, list[int]] = {}
    for i, layer in enumerate(layout.layers):
        for kind, shape in (("keys", layer.key_shape), ("values", layer.value_shape)):
            turns = layer.rotary_tensor == kind
            start = layer.rotary_start if turns else 0
            groups.setdefault((kind, shape, turns, start), []).append(i)
    for (kind, (heads, columns), turns, start), layers in groups.items():
        yield Stack(
            kind=kind,
            rows=_zeros((len(layers), capacity, heads, columns), dtype, device),
            layers=tuple(layers),
            rope=layout.rope if turns else None,
            rotary_start=start,
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that is really there, so that no request waits for it; `torch.zeros` is lazy."""
    try:
        return torch.empty(shape, dtype=dtype, device=device).zero_()
    except RuntimeError as error:
        gib = math.prod(shape) * dtype.itemsize / 1024**3
        raise ValueError(f"memory_gib: {gib:.1f} GiB for rows are not to be had here") from error

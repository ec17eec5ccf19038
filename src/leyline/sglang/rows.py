"""SGLang's KV pools as rows: copied from slot to slot and turned on the way, or turned in place.

MLA: one row `[1, latent + rotary]` a token and layer, the rotary columns last. MHA and GQA: a row
of keys `[heads, columns]`, each head beginning with its rotary columns, and a row of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leyline.rope import RopeSpec, Unsupported
from leyline.rotate import DTYPES, Planes, turn_unchecked
from leyline.sglang.rotary import Rotation, rotation_of

Shifts = Tensor | Sequence[tuple[int, int]]
"""int64 `[n]` on the CPU, or runs of rows: (rows, shift)."""


@dataclass(frozen=True, eq=False)
class Rows:
    """All rows of a pool.

    keys: whole rows of MLA, keys of MHA; `start` is the first column that turns, by `rope`.
    values: None for MLA. stream: where SGLang runs its forward passes, None for the current one.

    Slots are int64 on the pool's device and taken at their word: nothing here waits for a GPU.
    """

    keys: Planes
    values: Planes | None
    rope: RopeSpec
    start: int
    stream: torch.cuda.Stream | None = None

    @classmethod
    def of(
        cls,
        pool: Any,
        model: nn.Module,
        stream: torch.cuda.Stream | None = None,
        positions: int | None = None,
    ) -> Rows:
        """The rows that `pool` keeps for `model`.

        stream: give it if forward passes don't run on the current stream (overlap scheduling);
        without a GPU it doesn't matter. positions: the context length, see `rotation_of`.
        Raises Unsupported for pools and models whose rows can't be turned.
        """
        keys, values, start, head = _planes_of(pool)
        rotation = rotation_of(model, positions)
        _check_fit(rotation, len(keys.layers), head)
        stream = stream if keys.layers[0].is_cuda else None
        rows = cls(keys, values, rotation.spec, start, stream)
        rows._compile()
        return rows

    def copy(self, src: Tensor, dst: Tensor, shifts: Shifts) -> None:
        """Rows of `src` slots to `dst` slots, keys turned by their shifts; no slot is in both."""
        deltas = _deltas(shifts, src, dst)
        with self._in_order(src, dst):
            turn_unchecked(self.keys, src, dst, deltas, self.rope, self.start)
            if self.values is not None:
                # A launch of its own: nothing turns, so a row goes over in one piece.
                turn_unchecked(self.values, src, dst, torch.zeros_like(deltas), None)

    def turn(self, slots: Tensor, shifts: Shifts) -> None:
        """Rows where they are; what doesn't turn is not touched. Each slot at most once."""
        deltas = _deltas(shifts, slots, slots)
        with self._in_order(slots):
            turn_unchecked(self.keys, slots, slots, deltas, self.rope, self.start)

    def zero(self, slots: Tensor) -> None:
        """Overwrite rows with zeros."""
        with self._in_order(slots), torch.inference_mode():
            for planes in self._planes():
                for layer in planes.layers:
                    layer.index_fill_(0, slots, 0)

    def read(self, slots: Tensor) -> list[tuple[Tensor, ...]]:
        """For each layer its rows `[n, heads, columns]` on the CPU: (rows,) for MLA, else (keys,
        values). Waits for the device."""
        with self._in_order(slots):
            found = [
                tuple(planes.layers[i].index_select(0, slots).cpu() for planes in self._planes())
                for i in range(len(self.keys.layers))
            ]
        return found

    def __str__(self) -> str:
        _, heads, columns = self.keys.layers[0].shape
        kind = f"latents of {self.start}" if self.values is None else f"{heads} heads of {columns}"
        pairs = "interleaved" if self.rope.interleaved else "halves"
        return (
            f"{self.keys.slots} rows in {len(self.keys.layers)} layers, {self.keys.dtype}, {kind} "
            f"columns, {self.rope.width} that turn ({pairs})"
        )

    def _planes(self) -> tuple[Planes, ...]:
        return (self.keys,) if self.values is None else (self.keys, self.values)

    @contextmanager
    def _in_order(self, *slots: Tensor) -> Iterator[None]:
        """On the forward passes' stream: behind those that write the rows, and those that read
        them come later. The slots live until it is done."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.keys.device))
        for each in slots:
            each.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield

    def _compile(self) -> None:
        """All kernels, before the first request: on slot 0, which SGLang leaves to padding."""
        here = torch.zeros(1, dtype=torch.int64, device=self.keys.device)
        self.copy(here, here.clone(), [(1, 1)])
        self.turn(here, [(1, 1)])


def _deltas(shifts: Shifts, src: Tensor, dst: Tensor) -> Tensor:
    """One shift a row, int64 on the CPU."""
    if not isinstance(shifts, Tensor):
        runs = torch.tensor(shifts, dtype=torch.int64).reshape(-1, 2)
        shifts = torch.repeat_interleave(runs[:, 1], runs[:, 0])
    for each in (src, dst, shifts):
        if each.dtype != torch.int64 or each.dim() != 1:
            raise ValueError(
                "slots and shifts must be int64 of one dimension, "
                f"got {each.dtype} of shape {tuple(each.shape)}"
            )
    if not shifts.device.type == "cpu":
        raise ValueError(
            f"shifts must be on the CPU, not on {shifts.device}: a GPU would be waited for"
        )
    if not len(src) == len(dst) == len(shifts):
        raise ValueError(f"{len(src)} rows to {len(dst)} slots with {len(shifts)} shifts")
    return shifts


# -- pools ------------------------------------------------------------------------------------


def _planes_of(pool: Any) -> tuple[Planes, Planes | None, int, int]:
    """A pool's keys and values, the first rotary column, and how many columns turning sees."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    kind = type(pool)
    if kind not in (MHATokenToKVPool, MLATokenToKVPool):
        raise _refusal(
            f"rows in a {kind.__name__} can't be turned, those of MLATokenToKVPool and "
            "MHATokenToKVPool can"
        )
    refused = [sentence for sentence, there in _reasons(pool, kind is MLATokenToKVPool) if there]
    if refused:
        raise _refusal("; ".join(refused))
    if kind is MLATokenToKVPool:
        shape = (1, pool.kv_lora_rank + pool.qk_rope_head_dim)
        keys = _layers(pool, pool.kv_buffer, shape)
        return keys, None, pool.kv_lora_rank, pool.qk_rope_head_dim
    keys = _layers(pool, pool.k_buffer, (pool.head_num, pool.head_dim))
    values = _layers(pool, pool.v_buffer, (pool.head_num, pool.v_head_dim))
    return keys, values, 0, pool.head_dim


def _reasons(pool: Any, mla: bool) -> list[tuple[str, bool]]:
    found = [
        (
            f"rows kept as {pool.dtype} (--kv-cache-dtype) can't be turned: only "
            "bfloat16, float16 and float32 can",
            pool.dtype not in DTYPES or pool.store_dtype != pool.dtype,
        ),
        ("layers are sharded over ranks", bool(pool.layer_shard_enabled)),
        ("the pool gets its memory after graph capture", bool(pool.post_capture_active)),
    ]
    if mla:
        return [
            *found,
            ("sparse attention (DSA) keeps an index beside its rows", bool(pool.use_dsa)),
            ("rows carry scales", pool.kv_scale_buffer is not None),
        ]
    return [
        *found,
        ("rows are quantized", pool.is_quantized_kv_cache or pool.k_scale_buffer is not None),
        (
            f"the pool's layout is {pool.kv_cache_layout!r}, not 'nhd' "
            "(SGLANG_USE_HND_KVCACHE, SGLANG_AITER_KV_CACHE_LAYOUT)",
            pool.use_hnd or pool.kv_cache_layout != "nhd",
        ),
    ]


def _layers(pool: Any, buffers: Sequence[Tensor], shape: tuple[int, int]) -> Planes:
    """A pool's tensors, if they are `[slots, *shape]` each."""
    expected = (pool.size + pool.page_size, *shape)
    wrong = [tuple(t.shape) for t in buffers if tuple(t.shape) != expected or t.stride(-1) != 1]
    if wrong or len(buffers) != pool.layer_num or not buffers:
        raise _refusal(
            f"a {type(pool).__name__} of {pool.layer_num} layers should keep {expected} a layer, "
            f"but keeps {wrong[0] if wrong else len(buffers)}"
        )
    try:
        return Planes.of(buffers)
    except ValueError as error:
        raise _refusal(str(error)) from error


def _check_fit(rotation: Rotation, layers: int, head: int) -> None:
    """The model's rotation is the pool's."""
    if len(rotation.layers) != layers:
        raise _refusal(f"{layers} layers keep rows, but keys turn in {len(rotation.layers)}")
    if rotation.head != head or rotation.spec.width > head:
        raise _refusal(
            f"{rotation.spec.width} of {rotation.head} columns turn, but rows have {head} to turn"
        )


def _refusal(message: str) -> Unsupported:
    return Unsupported("unsupported_feature", message, "kv_pool")

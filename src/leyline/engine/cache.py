"""Transformers' cache and attention, over rows that lie in slots.

Several requests share one forward pass: their tokens are packed into one sequence, so that the
linear layers see one large batch, and attention is done request by request. A query at position p
reads the rows of positions 0 … p of its own request, wherever they lie and whenever they were
computed. Both hooks are Transformers' own: a `Cache` subclass and `AttentionInterface.register`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from leyline.engine.attention_mass import AttentionMass
from leyline.engine.planes import Planes
from leyline.engine.slots import Slots, as_run

ATTENTION = "leyline"
"""The name under which the attention function is registered with Transformers."""
BLOCK = 256
"""Queries that share a mask. The fewer, the less is computed only to be masked."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's part of a forward pass.

    slots: of positions 0 … last, int64 `[last + 1]`.
    positions: of the tokens computed now, ascending, int64 `[q]`; the last one is `last`.
    mass: where attention is watched, what it is added to.
    """

    slots: Slots
    positions: np.ndarray
    mass: AttentionMass | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Some of a chunk's queries, which read rows up to `length` at most, as the mask allows."""

    queries: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Watched:
    """The last queries of a chunk, at `positions` int64 `[q]`, whose attention goes into `mass`."""

    chunk: int
    mass: AttentionMass
    positions: Tensor


class ForwardPass:
    """What cache and attention need to know of the chunks in one forward pass."""

    def __init__(self, chunks: list[Chunk], planes: Planes, latent: bool) -> None:
        """latent: MLA, where the model itself expands the rows that the cache returns. Otherwise
        attention reads the planes directly."""
        self.planes = planes
        self.latent = latent
        dtype, device = planes.keys[0].dtype, planes.keys[0].device
        self.queries = [len(chunk.positions) for chunk in chunks]
        self.lengths = [len(chunk.slots) for chunk in chunks]
        self.written = _index(np.concatenate([c.slots[c.positions] for c in chunks]), device)
        if latent:
            self.read_all = _index(np.concatenate([chunk.slots for chunk in chunks]), device)
        else:
            self.read = [_index(chunk.slots, device) for chunk in chunks]
        self.blocks = [_blocks(chunk, dtype, device) for chunk in chunks]
        self.position_ids = torch.from_numpy(np.concatenate([c.positions for c in chunks]))[None]
        self.position_ids = self.position_ids.to(device)
        self.watched = [
            Watched(i, chunk.mass, torch.from_numpy(chunk.positions[-queries:]).to(device))
            for i, chunk in enumerate(chunks)
            if chunk.mass is not None and (queries := chunk.mass.count(chunk.positions))
        ]

    def rows(self, layer: int, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each chunk, `[1, heads, length, dim]`; `key` and `value` are what the
        model passes to attention."""
        if self.latent:
            return list(zip(key.split(self.lengths, 2), value.split(self.lengths, 2), strict=True))
        keys, values = self.planes.keys[layer], self.planes.values[layer]
        return [(_read(keys, index), _read(values, index)) for index in self.read]


_current: ContextVar[ForwardPass] = ContextVar("leyline_forward_pass")


class SlotCache(Cache):
    """Writes a layer's new rows to their slots, and reads back what the model asks for."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        super().__init__(layers=[])
        self._pass = forward_pass

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: `[1, heads, T, dim]`. For MLA returns the rows of all chunks,
        `[1, heads, sum of lengths, dim]`; else what came in."""
        keys, values = self._pass.planes.keys[layer_idx], self._pass.planes.values[layer_idx]
        _write(keys, self._pass.written, key_states)
        _write(values, self._pass.written, value_states)
        if not self._pass.latent:
            return key_states, value_states
        return _read(keys, self._pass.read_all), _read(values, self._pass.read_all)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always given to the model."""
        return 0


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the packed queries `[1, H, T, D]`, chunk by chunk, each over its own rows.
    Returns `[1, T, H, Dv]`."""
    odd = [name for name in ("s_aux", "softcap", "sliding_window") if kwargs.get(name) is not None]
    if odd:
        raise NotImplementedError(f"attention with {', '.join(odd)} is not supported")
    current = _current.get()
    layer: int = module.layer_idx  # type: ignore[assignment]
    chunks, rows = query.split(current.queries, 2), current.rows(layer, key, value)
    out = [
        _attend(q, k[:, :, : block.length], v[:, :, : block.length], block.mask, scaling)
        for queries, (k, v), blocks in zip(chunks, rows, current.blocks, strict=True)
        for q, block in zip(queries.split([b.queries for b in blocks], 2), blocks, strict=True)
    ]
    for each in current.watched:
        last = chunks[each.chunk][:, :, -len(each.positions) :]
        each.mass.add(last, rows[each.chunk][0], each.positions, scaling)
    return (torch.cat(out, dim=2) if len(out) > 1 else out[0]).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention)


def forward(
    model: torch.nn.Module,
    tokens: np.ndarray,
    chunks: list[Chunk],
    planes: Planes,
    latent: bool,
    wanted: list[int],
) -> Tensor:
    """One forward pass over the packed `tokens` int64 `[T]` of all chunks; their rows are written.

    wanted: indices into the packed tokens. Returns their logits, `[len(wanted), vocab]`.
    """
    current = ForwardPass(chunks, planes, latent)
    device = current.position_ids.device
    token = _current.set(current)
    try:
        out = model(
            input_ids=torch.from_numpy(tokens)[None].to(device),
            position_ids=current.position_ids,
            past_key_values=SlotCache(current),
            use_cache=True,
            logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=device),
        )
    finally:
        _current.reset(token)
    return out.logits[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """q: `[1, H, n, D]`; k, v: `[1, Hkv, length, D]` and `[1, Hkv, length, Dv]`. Without a mask,
    queries are the last of the rows."""
    heads, groups = q.shape[1], k.shape[1]
    causal = mask is None and q.shape[2] > 1
    if q.shape[2] == 1:  # heads of a group read the same rows: make them one query matrix
        folded = q.view(1, groups, heads // groups, q.shape[3])
        out = scaled_dot_product_attention(folded, k, v, scale=scaling)
        return out.reshape(1, heads, 1, -1)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=heads != groups
    )


def _blocks(chunk: Chunk, dtype: torch.dtype, device: torch.device) -> list[Block]:
    """A chunk's queries, a block at a time; a prompt's first chunk is one block without a mask."""
    if len(chunk.positions) in (1, len(chunk.slots)):
        return [Block(len(chunk.positions), len(chunk.slots), None)]
    every = torch.from_numpy(chunk.positions).to(device)
    return [
        Block(len(part), length := int(part[-1]) + 1, _mask(part, length, dtype))
        for part in every.split(BLOCK)
    ]


def _mask(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """0 where a query may read, -inf where not, `[q, length]`."""
    columns = torch.arange(length, device=positions.device)
    mask = torch.zeros(len(positions), length, dtype=dtype, device=positions.device)
    return mask.masked_fill_(columns[None] > positions[:, None], float("-inf"))


def _index(slots: Slots, device: torch.device) -> slice | Tensor:
    """A slice where the slots are one run (read in place), else an index."""
    run = as_run(slots)
    return run if run is not None else torch.from_numpy(slots).to(device)


def _write(plane: Tensor, where: slice | Tensor, states: Tensor) -> None:
    """plane: `[slots, heads, dim]`; states: `[1, heads, T, dim]`."""
    rows = states[0].transpose(0, 1)
    if isinstance(where, slice):
        plane[where] = rows
    else:
        plane.index_copy_(0, where, rows)


def _read(plane: Tensor, where: slice | Tensor) -> Tensor:
    """Rows as `[1, heads, length, dim]`: a view where they are one run, else a copy."""
    rows = plane[where] if isinstance(where, slice) else plane.index_select(0, where)
    return rows.transpose(0, 1)[None]

"""SGLang's torch attention, without the queries that it pads each prefill pass with.

`torch_native` widens a pass over a few new tokens to the whole length: 7 tokens behind 6000
cached ones cost the attention of 6007. Here the new queries alone attend, with the same function
of torch, so that the time of a splice means something on a CPU too.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention as attend

BLOCK = 512  # queries: later rows of the cache are not read only to be masked


class CpuAttention(TorchNativeAttnBackend):
    """Causal attention over a request's slots; windows and encoders are left to SGLang's own."""

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        args = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
        lens = (extend_prefix_lens, extend_seq_lens)
        if not options["causal"] or _special(encoder_lens, options):
            return super()._run_sdpa_forward_extend(*args, *lens, encoder_lens, **options)
        counts = extend_seq_lens.tolist()
        return _attend_each(*args, counts, options["scaling"])

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        args = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
        if _special(encoder_lens, options):
            return super()._run_sdpa_forward_decode(*args, encoder_lens, **options)
        return _attend_each(*args, [1] * len(seq_lens), options["scaling"])


def _special(encoder_lens: torch.Tensor | None, options: dict[str, Any]) -> bool:
    window = options.get("sliding_window_size")
    return encoder_lens is not None or (window is not None and window > -1)


def _attend_each(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    counts: list[int],
    scale: float | None,
) -> torch.Tensor:
    """One request after the other; counts: its queries, which are its last tokens."""
    start = 0
    for row, length, n in zip(req_pool_indices.tolist(), seq_lens.tolist(), counts, strict=True):
        slots = req_to_token[row, :length]
        keys = k_cache[slots].to(query.dtype)
        # MLA's values are the first columns of its keys. With all columns torch takes a fast kernel
        # that needs keys and values of one width; what is too much is cut.
        latents = v_cache.data_ptr() == k_cache.data_ptr()
        values = keys if latents else v_cache[slots].to(query.dtype)
        for at in range(0, n, BLOCK):
            end = min(at + BLOCK, n)
            seen = length - n + end
            output[start + at : start + end] = _attend(
                query[start + at : start + end], keys[:seen], values[:seen], scale
            )[..., : v_cache.shape[-1]]
        start += n
    return output


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """All [tokens, heads, width]; the queries are the last of the tokens."""
    n, seen = len(query), len(keys)
    mask = torch.ones(n, seen, dtype=torch.bool).tril(seen - n) if 1 < n < seen else None
    out = attend(
        query.movedim(0, 1)[None],
        keys.movedim(0, 1)[None],
        values.movedim(0, 1)[None],
        attn_mask=mask,
        is_causal=1 < n == seen,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out[0].movedim(1, 0)

"""Logits to tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from leyline.engine.request import Logprob, Sampling


def make_generator(sampling: Sampling, device: torch.device) -> torch.Generator | None:
    """The random numbers of one request: its own when it brings a seed."""
    if sampling.seed is None or sampling.temperature == 0:
        return None
    generator = torch.Generator(device=device)
    return generator.manual_seed(sampling.seed)


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """Draw one token from `logits` `[vocab]`: temperature, then top-k, then top-p."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = (logits.float() - logits.max().float()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled[scaled < scaled.topk(sampling.top_k).values[-1]] = float("-inf")
    probs = scaled.softmax(-1)
    if sampling.top_p < 1:
        ordered, which = probs.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered[1:][before[1:] >= sampling.top_p] = 0  # the most likely token always stays
        probs = torch.zeros_like(probs).scatter_(0, which, ordered)
    return int(torch.multinomial(probs, 1, generator=generator))


def logprob_of(logits: Tensor, token: int, alternatives: int) -> Logprob:
    """The model's own log-probabilities (before temperature and cuts) from `logits` `[vocab]`."""
    logprobs = logits.float().log_softmax(-1)
    top: list[tuple[int, float]] = []
    if alternatives:
        values, tokens = logprobs.topk(min(alternatives, len(logprobs)))
        top = list(zip(tokens.tolist(), values.tolist(), strict=True))
    return Logprob(token, float(logprobs[token]), tuple(top))

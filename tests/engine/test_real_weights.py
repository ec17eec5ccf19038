"""I4 with real weights: SmolLM2 goes on with a recorded session after an edit of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leyline.channel import Channel
from leyline.engine.engine import Config, Engine
from leyline.engine.request import Sampling
from leyline.replay import turns_of
from leyline.traces import load_traces

STEPS = 12


@pytest.mark.slow
def test_recorded_session_continues_as_the_reference_splice(smollm2: Path) -> None:
    """I4: tokens and log-probabilities after the engine's splice are those of Transformers running
    the stub and the tail over a cache rebuilt from original rows, rotated in fp64. Without the
    rotation they are far off."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    session = next(s for s in load_traces() if s.id == "abe6103153a8")
    turns = turns_of(tokenizer, session, keep=100)
    source = turns[3].prompt
    start, end = len(turns[0].prompt) + 40, len(turns[0].prompt) + 240
    stub = np.array(tokenizer("[evicted: old tool output]").input_ids)
    tail = np.array(tokenizer("<|im_end|>\n<|im_start|>assistant\nTHOUGHT:").input_ids)
    target = np.concatenate([source[:start], stub, source[end:], tail])

    with Engine.load(smollm2, config=Config(memory_gib=0.5)) as engine:
        channel = Channel("s")
        # The last prompt token has a row once an answer follows it.
        first = engine.generate(source, Sampling(max_tokens=1, ignore_eos=True), channel)
        answer = engine.generate(
            target, Sampling(max_tokens=STEPS, ignore_eos=True, logprobs=0), channel
        )
    assert first.report is not None and answer.report is not None
    assert answer.report.computed == len(stub) + len(tail)
    assert answer.report.moved == len(source) - end and not answer.report.copied

    with torch.inference_mode():
        tokens, logprobs = _reference(model, source, start, end, stub, tail, rotate=True)
        astray, _ = _reference(model, source, start, end, stub, tail, rotate=False)
    assert answer.tokens == tokens
    got = torch.tensor([each.logprob for each in answer.logprobs])
    # fp32 through 30 layers; rotating in fp32 or fp64 and other shapes of the same products.
    torch.testing.assert_close(got, logprobs, atol=2e-3, rtol=0)
    assert astray != tokens


def _reference(
    model: Any,
    source: np.ndarray,
    start: int,
    end: int,
    stub: np.ndarray,
    tail: np.ndarray,
    rotate: bool,
) -> tuple[list[int], Tensor]:
    """Greedy tokens and their log-probabilities from a cache that was spliced by hand."""
    from transformers import DynamicCache

    original = DynamicCache(config=model.config)
    model(input_ids=torch.from_numpy(source)[None], past_key_values=original, logits_to_keep=1)
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(original.layers):
        cache.update(layer.keys[:, :, :start], layer.values[:, :, :start], i)
    _run(model, cache, stub, start)
    delta = len(stub) - (end - start) if rotate else 0
    width = original.layers[0].keys.shape[-1]
    theta = model.config.rope_parameters["rope_theta"]
    angles = delta * theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turn = torch.polar(torch.ones_like(angles), angles)
    for i, layer in enumerate(original.layers):
        x, y = layer.keys[:, :, end:].double().chunk(2, -1)
        turned = torch.complex(x, y) * turn
        keys = torch.cat([turned.real, turned.imag], -1).float()
        cache.update(keys, layer.values[:, :, end:], i)
    at = start + len(stub) + len(source) - end
    logits = _run(model, cache, tail, at)
    at += len(tail)
    tokens: list[int] = []
    logprobs = []
    for _ in range(STEPS):
        tokens.append(int(logits.argmax()))
        logprobs.append(logits.log_softmax(-1)[tokens[-1]])
        logits = _run(model, cache, np.array(tokens[-1:]), at)
        at += 1
    return tokens, torch.stack(logprobs)


def _run(model: Any, cache: Any, tokens: np.ndarray, at: int) -> Tensor:
    """Logits `[vocab]` behind the last of `tokens`, which begin at position `at`."""
    positions = torch.arange(at, at + len(tokens))[None]
    out = model(
        input_ids=torch.from_numpy(tokens)[None],
        position_ids=positions,
        past_key_values=cache,
        logits_to_keep=1,
    )
    return out.logits[0, -1]

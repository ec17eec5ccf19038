"""Attention mass: what an answer says of it is what Transformers' own eager attention gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import ARCHITECTURES, ask, engine, greedy, plain_model, tokens_of

from leyline.channel import Channel
from leyline.engine.attention_mass import WINDOW
from leyline.engine.request import Request, Sampling

ASKED = Channel("a", attention=True)
ANSWER = greedy(5)


def expected(name: str, prompt: np.ndarray, answer: list[int], first: int) -> np.ndarray:
    """From the whole attention matrices of prompt and answer; queries from `first` on."""
    model = plain_model(name)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    whole = np.concatenate([prompt, answer[:-1]])
    with torch.inference_mode():
        out = model(input_ids=torch.from_numpy(whole)[None], output_attentions=True)
    model.set_attn_implementation(before)
    weights = torch.cat(out.attentions).double()  # [layers, heads, q, rows]
    return weights[:, :, first:, : len(prompt)].mean((0, 1, 2)).numpy()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [1024, 29])
def test_shares_are_those_of_eager_attention(name: str, chunk: int) -> None:
    """Also where the queries that count come in two chunks."""
    prompt = tokens_of(np.random.default_rng(100), 100)
    with engine(name, chunk=chunk) as made:
        found = made.generate(prompt, ANSWER, ASKED)
        assert found.attention is not None and found.attention.shape == (100,)
        want = expected(name, prompt, found.tokens, 100 - WINDOW)
        np.testing.assert_allclose(found.attention, want, rtol=2e-4, atol=1e-7)
        plain = made.generate(prompt, ANSWER, Channel("b"))
        assert plain.attention is None and plain.tokens == found.tokens


def test_only_queries_that_were_computed_count() -> None:
    """Of a prompt that is cached but for its last three tokens, these and the answer's."""
    prompt = tokens_of(np.random.default_rng(100), 100)
    with engine("llama") as made:
        ask(made, prompt[:97], session="a")
        found = made.generate(prompt, ANSWER, ASKED)
        assert found.report is not None and found.report.computed == 3
        want = expected("llama", prompt, found.tokens, 97)
        np.testing.assert_allclose(found.attention, want, rtol=2e-4, atol=1e-7)


def test_requests_in_one_pass_are_told_apart() -> None:
    prompts = [tokens_of(np.random.default_rng(seed), 60) for seed in (1, 2, 3)]
    channels = [Channel("a", attention=True), None, Channel("c", attention=True)]
    with engine("qwen3") as made:
        handles = [
            made.submit(Request(prompt, ANSWER, channel))
            for prompt, channel in zip(prompts, channels, strict=True)
        ]
        answers = [handle.result() for handle in handles]
    assert answers[1].attention is None
    for i in (0, 2):
        want = expected("qwen3", prompts[i], answers[i].tokens, 60 - WINDOW)
        np.testing.assert_allclose(answers[i].attention, want, rtol=2e-4, atol=1e-7)


def test_a_recorded_answer_is_looked_at_too() -> None:
    prompt, answer = tokens_of(np.random.default_rng(50), 50), (3, 1, 4, 1, 5, 9)
    with engine("deepseek_v2") as made:
        found = made.generate(prompt, Sampling(forced=answer), ASKED)
    want = expected("deepseek_v2", prompt, list(answer), 50 - WINDOW)
    np.testing.assert_allclose(found.attention, want, rtol=2e-4, atol=1e-7)

"""Drawing tokens, their log-probabilities, and their text."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    ALL,
    ask,
    assert_same,
    distribution,
    engine,
    engine_model,
    fresh,
    generated,
    greedy,
    lineage,
    session_rows,
    tokens_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline.channel import EngineError
from leyline.engine.engine import Handle
from leyline.engine.request import Delta, Request, Sampling
from leyline.engine.sampler import logprob_of, make_generator, sample
from leyline.engine.text import TextStream

PROMPT = tokens_of(np.random.default_rng(0), 40)
CPU = torch.device("cpu")


# -- the sampler by itself ------------------------------------------------------------------------


def shares(logits: torch.Tensor, sampling: Sampling, n: int = 4000) -> torch.Tensor:
    generator = make_generator(sampling, CPU)
    drawn = torch.tensor([sample(logits, sampling, generator) for _ in range(n)])
    return torch.bincount(drawn, minlength=len(logits)).double() / n


def allowed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The distribution to be drawn from, token by token, best first."""
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True).tolist()
    if top_k:
        order = order[:top_k]
    total = sum(float(probs[token]) for token in order)
    out, mass = torch.zeros_like(probs), 0.0
    for token in order:
        if mass >= top_p and mass > 0:
            break
        mass += float(probs[token]) / total
        out[token] = probs[token]
    return out / out.sum()


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.05, 0.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 10, 500])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_drawn_shares(temperature: float, top_k: int, top_p: float) -> None:
    """Tokens come as often as their cut and rescaled probabilities say (5 standard deviations),
    others never."""
    logits = 2 * torch.randn(30, generator=torch.Generator().manual_seed(top_k))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=1)
    expected = allowed(logits, temperature, top_k, top_p)
    found = shares(logits, sampling)
    assert found[expected == 0].sum() == 0
    spread = (expected * (1 - expected) / 4000).sqrt()
    assert ((found - expected).abs() <= 5 * spread + 1e-3).all()


@pytest.mark.parametrize("temperature", [1e-42, 1e-30, 1e-6, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    """Neither overflows: as cold as that is greedy."""
    logits = torch.tensor([3.0, -4.0, 9.0, 8.9])
    token = sample(
        logits, Sampling(temperature=temperature, seed=0), make_generator(Sampling(seed=0), CPU)
    )
    assert token == 2 if temperature < 1 else 0 <= token < 4


def test_logprob_of() -> None:
    """The model's own log-probabilities, whatever the temperature; alternatives best first."""
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    expected = logits.double() - logits.double().exp().sum().log()
    found = logprob_of(logits, 2, 3)
    assert (found.token, [t for t, _ in found.top]) == (2, [1, 2, 0])
    assert found.logprob == pytest.approx(float(expected[2]), abs=1e-6)
    assert [v for _, v in found.top] == pytest.approx(
        [float(expected[t]) for t in (1, 2, 0)], abs=1e-6
    )
    assert logprob_of(logits, 0, 0).top == ()
    assert len(logprob_of(logits, 0, 99).top) == 4


# -- through the engine ---------------------------------------------------------------------------


def test_greedy_and_logprobs() -> None:
    """Greedy tokens are Transformers', log-probabilities those of a forward over the whole text."""
    with engine() as made:
        answer = ask(made, PROMPT, greedy(12, ALL))
        assert answer.tokens == generated("llama", PROMPT, 12)
        assert_same(answer, fresh("llama", PROMPT, answer.tokens), 1e-4)
        assert (answer.reason, len(answer.logprobs)) == ("length", 12)
        few = ask(made, PROMPT, greedy(12, 3))
        for each, row in zip(few.logprobs, distribution(answer), strict=True):
            assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-4)
            assert [t for t, _ in each.top] == row.topk(3).indices.tolist()
        assert ask(made, PROMPT, greedy(3)).logprobs == []


def test_seed() -> None:
    """The same seed draws the same, alone or among others; another seed or none draws otherwise."""

    def drawn(seed: int | None) -> Sampling:
        return Sampling(max_tokens=20, temperature=1.5, seed=seed, ignore_eos=True)

    with engine() as made:
        alone = ask(made, PROMPT, drawn(5)).tokens
        handles = [made.submit(Request(PROMPT, drawn(seed))) for seed in (5, 6, None, 5)]
        together = [handle.result().tokens for handle in handles]
        assert together[0] == together[3] == alone
        assert together[1] != alone and together[2] not in (alone, together[1])
        assert ask(made, PROMPT, drawn(-1)).tokens != alone


def varied_answer() -> tuple[np.ndarray, list[int], int]:
    """A prompt, its answer, and a place from 2 on where a token comes that did not come before."""
    for seed in range(50):
        prompt = tokens_of(np.random.default_rng(seed), 40)
        answer = generated("llama", prompt, 10)
        for i in range(2, 9):
            if answer[i] not in answer[:i]:
                return prompt, answer, i
    raise AssertionError("all answers go in circles")


def test_max_tokens_and_eos(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer ends at its length or behind the EOS token, which is its last; `ignore_eos` goes
    on."""
    prompt, expected, at = varied_answer()
    monkeypatch.setattr(
        engine_model("llama").generation_config, "eos_token_id", [511, expected[at]]
    )
    with engine() as made:
        for n in (0, 1, at):
            answer = ask(made, prompt, Sampling(max_tokens=n))
            assert (answer.tokens, answer.reason) == (expected[:n], "length")
        for most in (at + 1, 10, None):
            answer = ask(made, prompt, Sampling(max_tokens=most))
            assert (answer.tokens, answer.reason) == (expected[: at + 1], "stop")
        assert ask(made, prompt, greedy(10)).tokens == expected


def test_as_many_as_fit() -> None:
    """Without max_tokens the answer fills the context, and not a token more."""
    with engine(max_tokens=60) as made:
        answer = ask(made, PROMPT, Sampling(ignore_eos=True))
        assert (answer.tokens, answer.reason) == (generated("llama", PROMPT, 20), "length")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", -0.1),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("seed", 2**64),
        ("seed", -(2**70)),
        ("logprobs", -1),
        ("logprobs", 10**6),
        ("forced", (-1, 3)),
        ("forced", (10**6,)),
        ("stop", ("",)),
    ],
)
def test_bad_settings_are_refused(field: str, value: Any) -> None:
    """A setting that can't be followed is refused in a sentence with its name, and the engine goes
    on."""
    with engine() as made:
        settings = Sampling(
            **{"max_tokens": 3, "temperature": 1.0, "ignore_eos": True, field: value}
        )
        with pytest.raises(EngineError, match=field):
            ask(made, PROMPT, settings)
        assert ask(made, PROMPT, greedy(3)).tokens == generated("llama", PROMPT, 3)


@pytest.mark.parametrize(
    "prompt",
    [np.zeros(0, np.int64), np.array([1.5]), np.array([[1]]), np.array([-1]), np.array([512])],
)
def test_bad_prompts_are_refused(prompt: np.ndarray) -> None:
    with engine() as made:
        with pytest.raises(EngineError, match="prompt"):
            made.submit(Request(prompt))
        assert ask(made, PROMPT, greedy(3)).tokens == generated("llama", PROMPT, 3)


def test_zero_top_p_and_extreme_temperature_in_the_engine() -> None:
    """Both draw the most likely token."""
    with engine() as made:
        expected = generated("llama", PROMPT, 5)
        for cold in (
            dict(temperature=1.0, top_p=0.0),
            dict(temperature=1e-42),
            dict(temperature=1.0, top_k=1),
        ):
            answer = ask(made, PROMPT, Sampling(max_tokens=5, ignore_eos=True, seed=1, **cold))  # type: ignore[arg-type]
            assert answer.tokens == expected


def test_a_receiver_that_raises() -> None:
    """It loses its events; everybody else is served."""

    def receive(event: object) -> None:
        raise ValueError("gone")

    with engine() as made:
        made.submit(Request(PROMPT, greedy(3)), receive)
        assert ask(made, PROMPT, greedy(3)).tokens == generated("llama", PROMPT, 3)


@pytest.mark.parametrize("n", [1, 2, 25])
@pytest.mark.parametrize("session", [None, "s"])
def test_forced_answer(n: int, session: str | None) -> None:
    """Afterwards the cache is as if the model had given the answer: same rows, same session."""
    rng = np.random.default_rng(n)
    said = tuple(int(t) for t in tokens_of(rng, n))
    longer = np.concatenate([PROMPT, said, [7, 8]])
    with engine(chunk=16) as made:
        answer = ask(made, PROMPT, Sampling(forced=said), session)
        assert (answer.tokens, answer.reason) == (list(said), "stop")
        assert answer.report is not None and answer.report.computed == len(PROMPT)
        if session:
            assert np.array_equal(lineage(made).tokens, longer[: len(PROMPT) + n - 1])
        again = ask(made, longer, greedy(5, ALL), session)
        assert again.report is not None and again.report.shared == len(PROMPT) + n - 1
        assert_same(again, fresh("llama", longer, again.tokens), 1e-4)


def test_forced_equals_given() -> None:
    """The rows of a forced answer are those of the same answer given by the model, up to the order
    of sums."""
    rows = []
    for sampling in (greedy(9), Sampling(forced=tuple(generated("llama", PROMPT, 9)))):
        with engine() as made:
            ask(made, PROMPT, sampling, "s")
            rows.append(session_rows(made))
    for (k, v), (k2, v2) in zip(*rows, strict=True):
        assert k.shape == k2.shape
        assert (k - k2).abs().max() < 1e-4 and (v - v2).abs().max() < 1e-4


# -- text ---------------------------------------------------------------------------------------


@cache
def byte_tokenizer() -> Any:
    """One token a byte (3 to 258), and a few words of several characters from 300 on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for i, word in enumerate(WORDS):
        vocab[pieces.pre_tokenize_str(word)[0][0]] = 300 + i
    for i in range(512):
        if i not in vocab.values():
            vocab[f"unused{i}"] = i
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pieces
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", pad_token="<pad>", bos_token="<s>"
    )


WORDS = ["END", " stop", "ab", "ba", "日本", "é!"]


def as_bytes(text: str) -> list[int]:
    """One token a byte."""
    return byte_tokenizer()(text, add_special_tokens=False).input_ids


def streamed(tokens: list[int], stop: tuple[str, ...]) -> tuple[list[str], str | None]:
    """What is shown token by token, and which stop string ended it."""
    stream = TextStream(byte_tokenizer(), stop)
    out = []
    for token in tokens:
        out.append(stream.push(token))
        if stream.stopped_by is not None:
            break
    out.append(stream.flush())
    return out, stream.stopped_by


CHARACTERS = st.text(alphabet="abé日😀 !", max_size=25)


@given(CHARACTERS, st.lists(st.text(alphabet="abé日😀 ", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300)
def test_stop_strings_over_bytes(text: str, stop: list[str]) -> None:
    """Characters of several tokens come whole; the text ends before the stop string that is
    complete first."""
    tokens = as_bytes(text)
    assert len(tokens) == len(text.encode())
    shown, stopped_by = streamed(tokens, tuple(stop))
    ends = [
        (end, end - len(s), s)
        for s in stop
        for end in range(len(text) + 1)
        if text[:end].endswith(s)
    ]
    if not ends:
        assert ("".join(shown), stopped_by) == (text, None)
    else:
        _, start, by = min(ends)
        assert ("".join(shown), stopped_by) == (text[:start], by)
    assert "\ufffd" not in "".join(shown)


@given(
    st.lists(st.sampled_from([*range(300, 306), *as_bytes("ab!é")]), max_size=15),
    st.sampled_from(["", "ba", "bEND", "Da", "本a", "D s"]),
)
@settings(max_examples=300)
def test_stop_strings_over_words(tokens: list[int], stop: str) -> None:
    """The same where a token brings several characters and a stop string ends, or begins, in the
    middle of one."""
    text = byte_tokenizer().decode(tokens)
    shown, stopped_by = streamed(tokens, (stop,) if stop else ())
    if stop and stop in text:
        assert ("".join(shown), stopped_by) == (text[: text.index(stop)], stop)
    else:
        assert ("".join(shown), stopped_by) == (text, None)


def test_text_is_held_back_no_longer_than_needed() -> None:
    shown, _ = streamed(as_bytes("xEENDy"), ("END",))
    assert shown[:3] == ["x", "", "E"] and "".join(shown) == "xE"
    shown, _ = streamed(as_bytes("aé日"), ())
    assert shown == ["a", "", "é", "", "", "日", ""]


def test_half_a_character_at_the_end() -> None:
    """What can't be completed any more is shown as a replacement character, once."""
    shown, _ = streamed(as_bytes("a日")[:-1], ())
    assert "".join(shown) == "a\ufffd"


def test_special_tokens_have_no_text() -> None:
    shown, _ = streamed([1, *as_bytes("a"), 2], ())
    assert "".join(shown) == "a"


def test_without_a_tokenizer() -> None:
    stream = TextStream(None, ("a",))
    assert (stream.push(5), stream.flush(), stream.stopped_by) == ("", "", None)


def deltas(handle: Handle) -> list[Delta]:
    return [event for event in handle.events() if isinstance(event, Delta)]


def test_stop_string_in_the_engine() -> None:
    """The engine's text is that of its tokens; it ends before a stop string that begins in one
    token and ends in another, and what is streamed never shows a part of it."""
    tokenizer = byte_tokenizer()
    with engine(tokenizer=tokenizer) as made:
        whole = ask(made, PROMPT, greedy(40))
        assert whole.text == tokenizer.decode(whole.tokens, skip_special_tokens=True)
        at = len(tokenizer.decode(whole.tokens[:15], skip_special_tokens=True))
        stop = whole.text[at - 2 : at + 3]
        ends = whole.text.index(stop)
        handle = made.submit(
            Request(PROMPT, Sampling(max_tokens=40, ignore_eos=True, stop=("no such text", stop)))
        )
        parts = deltas(handle)
        assert "".join(part.text for part in parts) == whole.text[:ends]
        said = [token for part in parts for token in part.tokens]
        assert said == whole.tokens[: len(said)] and len(said) < 40
        answer = ask(made, PROMPT, Sampling(max_tokens=40, ignore_eos=True, stop=(stop,)), "s")
        assert (answer.reason, answer.text) == ("stop", whole.text[:ends])
        assert len(lineage(made).tokens) == len(PROMPT) + len(answer.tokens) - 1

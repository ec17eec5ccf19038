"""The replay of a recorded session and the demo made of it: counts and files, never times."""

from __future__ import annotations

import json
import random
import string
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bytes_tokenizer import bytes_tokenizer
from leyline.demo import find_session, run
from leyline.engine.engine import Config, Engine
from leyline.policy import PLACEHOLDER
from leyline.replay import ArmResult, encode, fitting, replay, turns_of
from leyline.tiny import tiny_model
from leyline.traces import Session, calls


def _words(rng: random.Random, n: int) -> str:
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=5)) for _ in range(n))


def _session(seed: int = 0, turns: int = 6) -> Session:
    """Random text throughout, so that nothing repeats by chance."""
    rng = random.Random(seed)
    messages: list[dict[str, Any]] = [{"role": "user", "content": _words(rng, 10)}]
    for _ in range(turns):
        messages.append({"role": "assistant", "content": _words(rng, 8)})
        messages.append({"role": "tool", "content": _words(rng, 25)})
    return Session(f"s{seed}", (*messages[:-1],), ())


@pytest.fixture(scope="module")
def engine() -> Any:
    tokenizer = bytes_tokenizer()
    model = tiny_model("llama", num_hidden_layers=2)
    with Engine(model, tokenizer, Config(memory_gib=0.05), "tiny") as engine:
        yield engine


def test_answers_are_tokenized_as_in_the_next_prompt() -> None:
    session, tokenizer = _session(), bytes_tokenizer()
    turns = turns_of(tokenizer, session, keep=100)
    assert len(turns) == 6
    for turn, after in pairwise(turns):
        known = np.concatenate([turn.prompt, turn.answer])
        assert np.array_equal(after.prompt[: len(known)], known)
    for turn, call in zip(turns, calls(session), strict=True):
        assert turn.answer == (*encode(tokenizer, call.answer).tolist(), tokenizer.eos_token_id)


def test_old_tool_outputs_are_cleared() -> None:
    tokenizer = bytes_tokenizer()
    turns = turns_of(tokenizer, _session(), keep=2)
    texts = [tokenizer.decode(turn.prompt) for turn in turns]
    assert [text.count(PLACEHOLDER) for text in texts] == [0, 0, 0, 1, 2, 3]


def test_a_template_whose_prompts_do_not_lead_on() -> None:
    """As with templates that open a thought and later drop it: the answer is tokenized alone."""
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] <think>{% endif %}"
    )
    session = _session()
    for turn, call in zip(turns_of(tokenizer, session), calls(session), strict=True):
        assert tokenizer.decode(turn.prompt).endswith("<think>")
        assert turn.answer == tuple(encode(tokenizer, call.answer).tolist())


def test_both_arms(engine: Engine) -> None:
    """Same prompts; Leyline computes what is new or a stub and no more; I7 and nothing left."""
    session = _session(1)
    demo = run(engine, session, keep=2)
    turns = turns_of(engine.tokenizer, session, keep=2)
    assert demo.left_out == 0 and engine.stats().free == engine.stats().capacity
    for arm in (demo.prefix, demo.leyline):
        assert [turn.prompt_tokens for turn in arm.turns] == [len(turn.prompt) for turn in turns]
        for turn in arm.turns:
            assert turn.cached_tokens + turn.computed_tokens == turn.prompt_tokens
            assert turn.ttft_s > 0 and turn.fallback is None
    assert all(turn.moved_tokens == 0 and turn.edits == 0 for turn in demo.prefix.turns)
    frame = len("<|im_start|>tool\n<|im_end|>\n") + len("<|im_start|>assistant\n")
    for i, (plain, spliced) in enumerate(zip(demo.prefix.turns, demo.leyline.turns, strict=True)):
        assert spliced.computed_tokens <= plain.computed_tokens
        if i < 3:  # nothing is cleared yet
            assert spliced.computed_tokens == plain.computed_tokens
            continue
        output = len(session.messages[2 * i]["content"])
        most = output + len(PLACEHOLDER) + 2 * frame
        assert output <= spliced.computed_tokens <= most < plain.computed_tokens
        assert spliced.edits == 1 and spliced.moved_tokens > 0


def test_prefix_arm_reads_no_session_rows(engine: Engine) -> None:
    """I1: a plain replay beside a session's edited rows counts as on an empty cache."""
    turns = turns_of(engine.tokenizer, _session(2), keep=1)
    engine.reset()
    alone = replay(engine, turns, "prefix")
    engine.reset()
    replay(engine, turns, "leyline", "other")
    beside = replay(engine, turns[3:], "prefix")
    engine.reset()
    amortized = [turn.computed_tokens for turn in beside.turns[1:]]
    assert amortized == [turn.computed_tokens for turn in alone.turns[4:]]


def test_calls_too_long_for_the_model_are_left_out(engine: Engine) -> None:
    turns = turns_of(engine.tokenizer, _session(3))
    longest = len(turns[3].prompt) + len(turns[3].answer)
    assert fitting(turns, longest) == 4 and fitting(turns, longest - 1) == 3
    with Engine(tiny_model("llama"), engine.tokenizer, Config(0.05, max_tokens=longest)) as small:
        demo = run(small, _session(3))
        assert demo.left_out == 2 and len(demo.leyline.turns) == 4
    with Engine(tiny_model("llama"), engine.tokenizer, Config(0.05, max_tokens=50)) as small:
        with pytest.raises(ValueError, match="not one call fits into the 50 tokens"):
            run(small, _session(3))


def test_fewer_turns_and_progress(engine: Engine) -> None:
    seen: list[str] = []
    planned: list[int] = []
    demo = run(
        engine,
        _session(4),
        turns=2,
        on_plan=lambda turns: planned.append(len(turns)),
        on_turn=lambda arm, result: seen.append(arm),
    )
    assert planned == [2] and seen == ["prefix", "prefix", "leyline", "leyline"]
    assert len(demo.prefix.turns) == 2


def test_json(engine: Engine) -> None:
    value = json.loads(json.dumps(run(engine, _session(5)).as_json()))
    assert list(value["arms"]) == ["prefix", "leyline"]
    for arm in value["arms"].values():
        for key in ("prompt_tokens", "cached_tokens", "computed_tokens", "ttft_s"):
            assert arm[key] == pytest.approx(sum(turn[key] for turn in arm["turns"]))
    assert value["arms"]["leyline"]["cached_tokens"] > value["arms"]["prefix"]["cached_tokens"]


def test_picture(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    from leyline.plot import draw

    demo = run(engine, _session(6), turns=4)
    file = tmp_path / "demo.png"
    draw(demo.prefix, demo.leyline, "a title", file)
    pixels = imread(file)
    assert pixels.shape[0] > 600 and pixels.shape[1] > 900
    assert 0.01 < (pixels[..., :3].min(-1) < 0.9).mean() < 0.6  # drawn on, and not filled


def test_picture_of_one_call(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from leyline.plot import draw

    demo = run(engine, _session(6), turns=1)
    draw(demo.prefix, demo.leyline, "a title", tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000


def test_no_calls_no_division() -> None:
    assert ArmResult("prefix", ()).hit_rate == 0.0


def test_unknown_session() -> None:
    with pytest.raises(ValueError, match=r"no session 'x'; there are .*0d858f596973"):
        find_session("x")


def test_shipped_session_on_the_real_tokenizer(smollm2: Path) -> None:
    """What the demo replays: 30 calls that fit into SmolLM2's positions."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    turns = turns_of(tokenizer, find_session("0d858f596973"))
    assert len(turns) == 30 and fitting(turns, 8192) == 30
    assert max(len(turn.prompt) for turn in turns) == 6316
    assert {turn.answer[-1] for turn in turns} == {tokenizer.eos_token_id}

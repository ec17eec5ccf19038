"""nano: small, trained, with the real models' rows; and what a splice does to what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyline.models.nano import nano_path
from leyline.replay.turns import encode, turns_of
from leyline.traces import load_traces, shortest
from leyline.verify.answers import Arm, Turns, replay
from leyline.verify.run import Options, run
from leyline.verify.subject import Subject, load


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(nano_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(nano_path())


@pytest.fixture
def subject() -> Iterator[Subject]:
    loaded = load("nano", nano_path(), 0.5, "float32")
    with loaded.engine:
        yield loaded


def test_is_small_and_has_the_real_rows() -> None:
    size = sum(file.stat().st_size for file in nano_path().iterdir())
    assert size <= 16_000_000
    config = json.loads((nano_path() / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)
    assert config["rope_scaling"]["rope_type"] == "yarn"
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]


def _loss(model: Any, tokenizer: Any, before: str, text: str) -> float:
    """Nats a token of `text` behind `before`."""
    head, tail = encode(tokenizer, before), encode(tokenizer, text)
    whole = np.concatenate([head, tail])
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(whole)[None]).logits[0]
    behind = logits[len(head) - 1 : -1].log_softmax(-1)
    return -float(behind.gather(1, torch.from_numpy(tail)[:, None]).mean())


def test_has_learnt_python(model: Any, tokenizer: Any) -> None:
    """Text that is in no library: far from the 7.6 nats of guessing among 2048 tokens."""
    text = "    def close(self):\n        self._file.close()\n        self._file = None\n"
    before = "<|begin|>class Reader:\n    def __init__(self, path):\n        self.path = path\n\n"
    assert _loss(model, tokenizer, before, text) < 3.5


def test_reads_its_context(model: Any, tokenizer: Any) -> None:
    """What was in a tool's output comes easier with the output than without."""

    def asked(output: str) -> str:
        messages = [
            {"role": "user", "content": "Where is `zorbalize` defined? Look it up."},
            {"role": "assistant", "content": '```bash\ngrep -rn "def zorbalize" quux\n```'},
            {"role": "tool", "content": output},
        ]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    said = "THOUGHT: It is in quux/marvel.py, line 731. Let me read it."
    with_ = _loss(model, tokenizer, asked("quux/marvel.py:731:def zorbalize(item):"), said)
    without = _loss(model, tokenizer, asked("[evicted: old tool output]"), said)
    assert with_ < 0.8 * without


def test_likelihood_of_an_answer(subject: Subject, model: Any) -> None:
    """That of Transformers' own forward over prompt and answer."""
    session = shortest(load_traces(), 1)[0]
    turns = Turns.of(subject, session, 2)
    said = list(replay(subject, turns, Arm("full", edited=False, session=False)))
    for each, turn in zip(said, turns_of(subject.tokenizer, session, keep=99)[:2], strict=True):
        whole = np.concatenate([turn.prompt, turn.answer])
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(whole)[None]).logits[0]
        behind = logits[len(turn.prompt) - 1 : -1].double().log_softmax(-1)
        nll = -behind[range(len(turn.answer)), list(turn.answer)].sum()
        assert each.nll == pytest.approx(float(nll), rel=1e-4)
        assert each.tokens == len(turn.answer)


@pytest.mark.slow
def test_verify_holds(subject: Subject) -> None:
    """Also on real answers: the splice costs next to nothing, leaving out the rotation a lot."""
    found = run(subject, Options(quick=True))
    assert found.passed, [row.name for row in found.results.rows if row.met is False]
    assert not found.skipped
    measured = {row.name: row.value for row in found.results.rows}
    assert measured["answers.control"] > 0.1 and measured["answers.control.clear"] > 1

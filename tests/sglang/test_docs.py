"""docs/sglang.md works as it stands: its requests run against a real server, its code runs, and
what it lists is what the plugin has."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Server

from leyline.channel import Fallback
from leyline.sglang import refuse, sessions, versions
from leyline.sglang.cpu.__main__ import environment

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/sglang.md").read_text()
ADDRESS = "http://127.0.0.1:30000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def server(servers: Any) -> Server:
    return servers("mla", "--enable-metrics")


def shell(command: str, server: Server) -> str:
    assert ADDRESS in command
    done = subprocess.run(
        ["bash", "-ec", command.replace(ADDRESS, server.url)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_shows_an_edit(server: Server) -> None:
    (both,) = [block for block in blocks("sh") if "run-42" in block]
    first, second = both.split("\n\n")
    plain, spliced = (json.loads(shell(each, server)) for each in (first, second))
    assert plain["leyline"]["edits"] == []
    report = spliced["leyline"]
    (edit,) = report["edits"]
    assert edit["mode"] == "amortize" and edit["shift"] < 0 and report["fallback"] is None
    tokens = report["tokens"]
    assert tokens["moved"] >= 16
    assert tokens["prompt"] == tokens["shared"] + tokens["moved"] + tokens["computed"]
    cached = spliced["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == tokens["shared"] + tokens["moved"]
    (metrics,) = [block for block in blocks("sh") if "/metrics" in block]
    lines = shell(metrics, server)
    for name in re.findall(r"`(leyline_\w+_total|leyline_\w+_seconds)`", PAGE):
        kinds = ("", "_count")
        assert name == "leyline_fallbacks_total" or any(f"{name}{k}{{" in lines for k in kinds)


def test_curl_edits_shows_and_drops_a_session(server: Server) -> None:
    (routes,) = [block for block in blocks("sh") if "run-46" in block]
    said, answers = shell(routes, server), []
    while said:
        answer, end = json.JSONDecoder().raw_decode(said)
        answers.append(answer)
        said = said[end:].lstrip()
    report, view, dropped = answers
    assert report["session"] == view["session"] == dropped["session"] == "run-46"
    assert report["tokens"]["prompt"] == view["tokens"] > 0 and dropped["scrubbed"]


def test_python_clients_run(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    clients = [block for block in blocks("python") if "httpx" in block]
    assert len(clients) == 2
    for code in clients:
        assert ADDRESS in code
        exec(code.replace(ADDRESS, server.url), {})
    said = capsys.readouterr().out
    assert "'moved': 180" in said and "run-44" in said


def test_offline_engine_runs(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (code,) = [block for block in blocks("python") if "sglang.Engine" in block]
    cpu = (
        f"model_path={str(checkpoint('mla'))!r}, device='cpu', attention_backend='torch_native', "
        "mem_fraction_static=0.3, max_total_tokens=20000"
    )
    file = tmp_path / "offline.py"
    file.write_text(code.replace('model_path="MODEL"', cpu))
    env = environment({**os.environ, "LEYLINE_CPU_FORK": "1"}, plain=False)
    done = subprocess.run(
        [sys.executable, str(file)], env=env, capture_output=True, text=True, timeout=240
    )
    assert "'moved': 180" in done.stdout, done.stdout + done.stderr[-4000:]


def test_what_is_refused_is_what_is_listed() -> None:
    """Every flag in a refusal's sentence stands on the page."""
    args = SimpleNamespace(tokenizer_worker_num=1)
    context = _Anything(server_args=args)
    sentences = [sentence for sentence, _ in _reasons(context)]
    assert len(sentences) > 10
    listed = PAGE.split("## What is refused at start")[1].split("##")[0]
    for sentence in sentences:
        for flag in re.findall(r"(--[\w-]+)", sentence):
            if flag not in ("--enable-hierarchical-cache", "--disaggregation-mode", "--pp-size"):
                assert flag in listed, sentence


def _reasons(context: Any) -> list[tuple[str, bool]]:
    original = refuse._sharded, refuse._rust_server
    refuse._sharded, refuse._rust_server = lambda ctx: False, lambda: False
    try:
        return refuse._reasons(context)
    finally:
        refuse._sharded, refuse._rust_server = original


class _Anything(SimpleNamespace):
    """Has every attribute: False unless given."""

    def __getattr__(self, name: str) -> Any:
        return _Anything() if name in ("params", "model_config") else False


def test_words_and_numbers_are_the_plugins() -> None:
    for version in versions.SUPPORTED:
        assert version in PAGE
    words = set(Fallback) - {Fallback.SWITCHED_OFF}
    assert set(re.findall(r"^\| `(\w+)` \| (?!what)", PAGE, re.MULTILINE)) >= words
    assert sessions.MAX_SESSIONS == 10_000 and "10 000 sessions" in PAGE
    assert sessions.MAX_TOKENS == 8_000_000 and "8 million tokens" in PAGE


def test_commands_exist() -> None:
    """Make targets are the Makefile's, modules can be run."""
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks("sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True) if line.startswith(("make", "python")) else []
            if words[:1] == ["make"]:
                assert re.search(rf"^[\w -]*\b{words[1]}\b[\w -]*:", makefile, re.MULTILINE), line
            elif words and words[2].startswith("leyline."):
                module = ROOT / "src" / Path(*words[2].split("."))
                assert (module / "__main__.py").exists() or module.with_suffix(".py").exists(), line


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", PAGE):
        assert target.startswith("http") or (ROOT / "docs" / target).exists(), target

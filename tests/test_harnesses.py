"""Agents of LangChain, OpenAI's SDK and mini-swe-agent edit their context against a real server:
what stands behind an edit stays cached with the few lines that are Leyline's, and not without.

The assistant's messages are forced (see forced_answers), tools and harnesses are real.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forced_answers import Call, Exchange, forced
from tiny_server import running, words

from test_docs import blocks
from test_examples import EXAMPLES, MARK

pytestmark = pytest.mark.slow  # harnesses take seconds to import

NEEDS = {
    "langchain_agent": ("langchain", "langchain_openai"),
    "openai_agents": ("agents",),
    "mini_swe_agent": ("minisweagent", "litellm"),
}


def script(name: str, files: list[str]) -> list[Call | str]:
    """What the assistant says: it reads each file, with a word about each or one at the end."""
    if name == "langchain_agent":
        return [*(Call("read", {"file": file}) for file in files), "They are about words."]
    if name == "openai_agents":
        return [
            said for file in files for said in (Call("read", {"file": file}), f"{file}: words.")
        ]
    return [*(Call("bash", {"command": f"head -c 3000 {file}"}) for file in files), SUBMIT]


SUBMIT = Call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo Words."})
EDITED = {
    # Calls for which an output is cleared, of those that four files take.
    "langchain_agent": [3, 4],
    "openai_agents": [4, 6],
    "mini_swe_agent": [3, 4],
}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{i}.txt" for i in range(4)]
    for i, path in enumerate(paths):
        path.write_text(words(i, 600))
    return [str(path) for path in paths]


@pytest.fixture(autouse=True)
def _stays_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No harness reaches for anything but this machine, and none writes into its user's home."""
    wanted: list[str] = []
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def check(host: Any) -> None:
        if host not in (None, "127.0.0.1", "::1", "localhost"):
            wanted.append(str(host))
            raise OSError(f"a test wanted {host}")

    def checked_look_up(host: Any, *rest: Any, **named: Any) -> Any:
        check(host)
        return look_up(host, *rest, **named)

    def checked_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            check(address[0])
        connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", checked_look_up)
    monkeypatch.setattr(socket.socket, "connect", checked_connect)
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "mini"))
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not wanted


def needs(name: str) -> None:
    """Skip where a harness is absent, but never in CI."""
    absent = [module for module in NEEDS[name] if importlib.util.find_spec(module) is None]
    if absent and not os.environ.get("CI"):
        pytest.skip(f"no {absent[0]}: pip install 'leyline-kv[agents]'")
    assert not absent


def program(name: str, leyline: bool = True) -> ModuleType:
    """An example, with or without the lines that are Leyline's."""
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines(keepends=True)
    kept = [line for line in lines if leyline or not line.rstrip().endswith(MARK)]
    module = ModuleType(name)
    exec(compile("".join(kept), f"{name}.py", "exec"), module.__dict__)
    return module


def run(
    name: str, files: list[str], said: list[Call | str] | None = None, leyline: bool = True
) -> list[Exchange]:
    """An example's calls on a server of its own, whose cache is empty."""
    said = script(name, files) if said is None else said
    with running() as server, forced(server.url, said) as front:
        program(name, leyline).main(files, front.url, "tiny")
    assert len(front.exchanges) == len(said)
    return front.exchanges


@pytest.mark.parametrize("name", NEEDS)
def test_harnesses_splice(name: str, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    needs(name)
    calls = run(name, files)
    # The harness shows its user the cached tokens that the engine counted.
    shown = re.findall(r"^  cached (\d+) of (\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert shown == [(str(call.cached), str(call.prompt)) for call in calls]

    assert len({call.report.session for call in calls if call.report}) == 1
    before = 0
    for number, call in enumerate(calls):
        report = call.report
        assert report is not None and report.fallback is None
        assert bool(report.edits) == bool(report.moved) == (number in EDITED[name])
        assert call.cached == report.shared + report.moved
        # All that an edit costs are the words that it put in.
        new = call.prompt - before - sum(edit.shift for edit in report.edits)
        assert report.computed <= new + sum(edit.replacement_tokens for edit in report.edits)
        before = call.prompt


@pytest.mark.parametrize("name", ["langchain_agent", "openai_agents"])
def test_without_leyline_the_same_edits_cost_what_stands_behind_them(
    name: str, files: list[str]
) -> None:
    needs(name)
    spliced, plain = run(name, files), run(name, files, leyline=False)
    for number, (ours, theirs) in enumerate(zip(spliced, plain, strict=True)):
        assert theirs.report is None and "leyline" not in theirs.request
        assert ours.request["messages"] == theirs.request["messages"]
        if number in EDITED[name]:
            report = ours.report
            assert report is not None
            # Of the words that an edit put in, a prefix cache may know the first.
            known = sum(edit.replacement_tokens for edit in report.edits)
            assert theirs.prompt - theirs.cached >= report.computed + report.moved - known


def test_mini_swe_agent_without_leyline_sends_all_it_ever_read(files: list[str]) -> None:
    needs("mini_swe_agent")
    spliced, plain = run("mini_swe_agent", files), run("mini_swe_agent", files, leyline=False)
    cleared = 0
    for ours, theirs in zip(spliced, plain, strict=True):
        assert ours.report is not None and theirs.report is None
        edits = ours.report.edits
        cleared -= sum(edit.shift for edit in edits)
        assert theirs.prompt - ours.prompt == cleared
        stubs = sum(edit.replacement_tokens for edit in edits)
        assert ours.report.computed <= theirs.prompt - theirs.cached + stubs
    assert cleared > 1000


def test_mini_swe_agent_goes_on_after_a_message_without_a_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    needs("mini_swe_agent")
    calls = run("mini_swe_agent", [], ["I will run a command.", SUBMIT])
    assert all(call.report and call.report.fallback is None for call in calls)
    out = capsys.readouterr().out
    assert out.count("Report(") == len(calls)
    assert "Submitted Words." in out


@pytest.mark.parametrize("number, name", list(enumerate(NEEDS)), ids=NEEDS)
def test_examples_page_runs(
    number: int,
    name: str,
    files: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its blocks come in the order of the harnesses here, one for each."""
    needs(name)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # as the page says
    code = blocks("docs/examples.md", "python")
    assert len(code) == len(NEEDS)
    address = "http://127.0.0.1:30000"
    assert address in code[number]
    with running() as server, forced(server.url, script(name, files)[-1:]) as front:
        exec(code[number].replace(address, front.url).replace("default", "tiny"), {})
    (call,) = front.exchanges
    assert call.report is not None and call.report.fallback is None
    assert call.report.session == call.request["leyline"]["session"]
    assert capsys.readouterr().out

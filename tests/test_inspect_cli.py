"""`leyline inspect`: a dump of what any of Leyline's servers tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from agent_run import ask, history, run_agent, turns_of
from tiny_server import running, tiny_engine
from typer.testing import CliRunner

from leyline.cli import app
from leyline.server.limits import Settings
from other_server import serving


def leyline(*words: Any) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, words)])


def test_everything_of_a_server(tmp_path: Path) -> None:
    with running(tiny_engine()) as server, server.http() as http:
        reports = run_agent(http, "a/b", 3)
        ask(http, "..", history(1))
        for url in (server.url, f"{server.url}/v1/"):
            done = leyline(url)
            assert done.exit_code == 0, done.output
            found = json.loads(done.stdout)
            assert found["server"] == server.url and found["not_told"] == []
            newest, oldest = found["sessions"]
            assert (newest["session"], oldest["session"]) == ("..", "a/b")
            assert [turn["report"] for turn in oldest["turns"]] == reports
            assert oldest["turns"] == turns_of(http, "a/b", text="whole")
            assert oldest["cached"]["segments"] and oldest["cached"]["edits"] > 0
        file = tmp_path / "dump.json"
        assert leyline(server.url, "--session", "..", "--out", file).exit_code == 0
        (only,) = json.loads(file.read_text())["sessions"]
        assert only["session"] == ".." and only["cached"] and only["turns"]
        done = leyline(server.url, "--session", "nobody")
        assert done.exit_code == 1
        assert "knows no session 'nobody'" in done.stderr
        assert done.stdout == ""


def test_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEYLINE_API_KEY", raising=False)
    with running(tiny_engine(), Settings(api_keys=("key-ä",))) as server:
        done = leyline(server.url)
        assert done.exit_code == 1 and "--key" in done.stderr
        assert json.loads(leyline(server.url, "--key", "key-ä").stdout)["sessions"] == []
        monkeypatch.setenv("LEYLINE_API_KEY", "key-ä")
        assert leyline(server.url).exit_code == 0


@contextmanager
def other_server(answers: dict[str, Any]) -> Iterator[str]:
    """A server with these answers by path, and a plain 404 for all else, as SGLang's has it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path)
            body = json.dumps({"detail": "Not Found"} if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Handler) as url:
        yield url


def test_a_server_that_tells_less() -> None:
    held = {"session": "s", "tokens": 5, "cached": 5}
    with other_server({"/v1/leyline/sessions/s": held}) as url:
        done = leyline(url)
        assert done.exit_code == 1
        assert "does not list its sessions" in done.stderr and "--session" in done.stderr
        done = leyline(url, "--session", "s")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert found["sessions"] == [{"session": "s", "cached": held, "turns": None}]
        (sentence,) = found["not_told"]
        assert "does not tell turns" in sentence and sentence in done.stderr
    with other_server({}) as url:
        done = leyline(url, "--session", "s")
        assert done.exit_code == 1 and "knows no session 's'" in done.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nowhere", "http://[", ""])
def test_no_server_there(url: str) -> None:
    done = leyline(url)
    assert done.exit_code == 1
    assert len(done.stderr.splitlines()) == 1 and "no answer" in done.stderr


def test_a_file_that_can_not_be_written(tmp_path: Path) -> None:
    done = leyline("--out", tmp_path / "no" / "x.json")
    assert done.exit_code == 1 and "folder does not exist" in done.stderr

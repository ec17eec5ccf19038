"""Clients that hang up: their requests end, and slots add up afterwards (I7)."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest
from tiny_server import Running, held, running, tiny_tokenizer, until, words

from leyline.engine import scheduler

TOKENS = tiny_tokenizer()(words(5, 400), add_special_tokens=False).input_ids


class Line:
    """A connection that is closed when the test wants it, not when a client library does."""

    def __init__(self, server: Running, path: str, body: dict[str, Any]) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=30)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"
        self.socket.sendall(head.encode() + content)

    def read_until(self, what: bytes) -> None:
        got = b""
        while what not in got:
            more = self.socket.recv(4096)
            assert more, got
            got += more

    def hang_up(self) -> None:
        self.socket.close()


class Gate:
    """Lets the engine's forward passes through, then holds it before the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
        self.left = passes
        self.reached, self.open = threading.Event(), threading.Event()
        works = scheduler.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                self.reached.set()
                assert self.open.wait(60)
            self.left -= 1
            return works(*args, **kwargs)

        monkeypatch.setattr(scheduler, "forward", forward)


def completion(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4000, "ignore_eos": True, "temperature": 0, **more}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_while_streaming(path: str) -> None:
    with running() as server:
        body = completion(TOKENS, stream=True)
        if "chat" in path:
            body["messages"] = [{"role": "user", "content": "hi"}]
            del body["prompt"]
        line = Line(server, path, body)
        line.read_until(b"data: ")
        line.hang_up()
        until(lambda: server.answered() == 1)
        assert server.settled().cached < 2000  # the answer was not gone on with


def test_while_waiting_for_the_whole_answer() -> None:
    with running() as server:
        line = Line(server, "/v1/completions", completion(TOKENS))
        until(lambda: server.engine.stats().running == 1)
        line.hang_up()
        until(lambda: server.answered() == 1)
        assert server.settled().cached < 2000
        endpoint = {"endpoint": "/v1/completions", "status": "499"}
        assert server.metric("leyline_requests_total", **endpoint) == 1


def test_before_it_began() -> None:
    with running() as server:
        with held(server.engine):
            line = Line(server, "/v1/completions", completion(TOKENS))
            until(lambda: len(server.engine._calls) == 1)
            line.hang_up()
            until(lambda: server.answered() == 1)
        assert server.settled().cached == 0


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["amortize", "forget"])
def test_in_the_middle_of_a_splice(
    monkeypatch: pytest.MonkeyPatch, passes: int, stream: bool, mode: str
) -> None:
    """Rows are moved, half of the replacement is prefilled, the client goes: nothing is lost, and
    the session goes on."""
    with running(chunk=32) as server, server.http() as http:
        leyline = {"session": "s", "mode": mode}
        begin = {"prompt": TOKENS, "max_tokens": 1, "leyline": leyline}
        assert http.post("/v1/completions", json=begin).status_code == 200
        new = tiny_tokenizer()(words(6, 150), add_special_tokens=False).input_ids
        edited = TOKENS[:100] + new + TOKENS[150:]
        gate = Gate(monkeypatch, passes)
        body = completion(edited, leyline=leyline, stream=stream)
        line = Line(server, "/v1/completions", body)
        assert gate.reached.wait(30)
        line.hang_up()
        until(lambda: server.answered() == 2)
        gate.open.set()
        assert server.settled().cached < 2000

        answer = http.post("/v1/completions", json={**body, "max_tokens": 2, "stream": False})
        tokens = answer.json()["leyline"]["tokens"]
        assert tokens["prompt"] == tokens["shared"] + tokens["moved"] + tokens["computed"]
        assert tokens["shared"] >= 100
        if mode == "amortize":  # what was moved before the client went is still found
            assert tokens["shared"] + tokens["moved"] >= len(TOKENS) - 50 - 32
        view = server.engine.session("", "s")
        assert view is not None and view.cached == view.tokens
        server.settled()


def test_again_and_again() -> None:
    """Random moments, sessions and edits; other requests go on undisturbed."""
    import random
    import time

    dice = random.Random(3)
    with running(chunk=64) as server, server.http() as http:
        alone = {"prompt": TOKENS[:50], "max_tokens": 5, "temperature": 0}
        want = http.post("/v1/completions", json=alone).json()["choices"][0]["text"]
        for i in range(25):
            at = dice.randrange(300)
            prompt = TOKENS[:at] + [dice.randrange(3, 500) for _ in range(dice.randrange(60))]
            prompt += TOKENS[at + dice.randrange(60) :]
            leyline = {"session": f"s{i % 3}", "mode": dice.choice(["amortize", "forget"])}
            body = completion(prompt, leyline=leyline, stream=dice.random() < 0.5)
            line = Line(server, "/v1/completions", body)
            time.sleep(dice.random() * 0.04)
            line.hang_up()
            if i % 5 == 0:
                answer = http.post("/v1/completions", json=alone).json()
                assert answer["choices"][0]["text"] == want
        server.settled()

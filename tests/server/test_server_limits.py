"""Keys, limits and failures: each with its own status, in the API's shape."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send
from tiny_server import Running, held, running, tiny_engine, until

from leyline.engine import scheduler
from leyline.server.auth import Keys
from leyline.server.errors import ApiError
from leyline.server.limits import OpenRequestsMiddleware, Settings
from leyline.server.run import listen, serve

BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 1}
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    """Keys, small bodies, one open request a key, a queue of two."""
    settings = Settings(api_keys=("key-a", "key-b"), max_body_bytes=2000, max_open=1)
    with running(settings=settings, max_waiting=2) as server:
        yield server


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer key-c", "Bearer key", "Basic key-a", "key-a", "Bearer \xe9"],
)
@pytest.mark.parametrize("path", [TEXT, "/v1/models", "/metrics", "/v1/leyline/sessions/a", "/no"])
def test_401(guarded: Running, header: str | None, path: str) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    with httpx.Client(base_url=guarded.url) as http:
        answer = http.request("POST" if path == TEXT else "GET", path, headers=headers)
    error = error_of(answer, 401)
    assert error["code"] == "invalid_api_key"
    assert "key-a" not in error["message"]
    assert answer.headers["www-authenticate"] == "Bearer"


def test_every_key_is_let_in(guarded: Running) -> None:
    for key in guarded.keys:
        assert guarded.client(key).models.list().data
    with pytest.raises(openai.AuthenticationError):
        guarded.client("key-c").models.list()
    with httpx.Client(base_url=guarded.url) as http:
        assert http.get("/health").json() == {"status": "ok"}


def test_keys() -> None:
    assert Keys().owner(None) == Keys().owner("Bearer whatever") == ""
    keys = Keys(["a", "b"])
    owners = {keys.owner("Bearer a"), keys.owner("bearer b")}
    assert len(owners) == 2 and "a" not in owners and "" not in owners
    with pytest.raises(ApiError):
        keys.owner("Bearer c")
    with pytest.raises(ValueError, match="empty"):
        Keys(["a", " "])


@pytest.mark.parametrize(
    "path", [TEXT, "/v1/chat/completions", "/v1/leyline/sessions/a/directives"]
)
@pytest.mark.parametrize("chunked", [False, True])
def test_413(guarded: Running, path: str, chunked: bool) -> None:
    pieces = [b"x" * 500] * 10
    content: Any = iter(pieces) if chunked else b"".join(pieces)
    with guarded.http() as http:
        error = error_of(http.post(path, content=content), 413)
        assert error["code"] == "request_too_large" and "2000" in error["message"]
        assert http.post(TEXT, json=BODY).status_code == 200


def test_a_body_is_refused_before_all_of_it_came(guarded: Running) -> None:
    """The client says that a gigabyte follows, and sends nothing of it."""
    import socket

    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as line:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key-a\r\n"
        line.sendall(f"{head}Content-Length: {10**9}\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 413")


def test_429(guarded: Running) -> None:
    """A key's own open requests are bounded; another key is served meanwhile."""
    with ThreadPoolExecutor(1) as pool, guarded.http("key-a") as a, guarded.http("key-b") as b:
        with held(guarded.engine):
            first = pool.submit(a.post, TEXT, json=BODY)
            until(lambda: len(guarded.engine._calls) > 0)
            with guarded.http("key-a") as again:
                answer = again.post(TEXT, json=BODY)
            error = error_of(answer, 429)
            assert error["type"] == "rate_limit_error"
            assert answer.headers["retry-after"] == "1"
            assert b.get("/v1/models").status_code == 200
        assert first.result().status_code == 200
        assert a.post(TEXT, json=BODY).status_code == 200


def test_a_request_is_over_when_its_last_byte_is_out() -> None:
    """Not when the app has returned: the next one of who read the answer may come before that."""
    statuses: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    limited = OpenRequestsMiddleware(app, most=1)
    scope: Scope = {"type": "http", "path": TEXT, "state": {"owner": "a"}}

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def note(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def client(message: Message) -> None:
        """Asks again while the answer is under way, and when it has all of it."""
        await note(message)
        if message["type"] == "http.response.body":
            await limited(scope, receive, note)

    asyncio.run(limited(scope, receive, client))
    assert statuses == [200, 429, 200]


def test_503_when_the_queue_is_full() -> None:
    with running(max_waiting=2) as server, ThreadPoolExecutor(2) as pool, server.http() as http:
        with held(server.engine):
            first = [pool.submit(http.post, TEXT, json=BODY) for _ in range(2)]
            until(lambda: server.engine._posted == 2)
            for stream in (False, True):
                answer = http.post(TEXT, json={**BODY, "stream": stream})
                assert error_of(answer, 503)["code"] == "queue_full"
                assert answer.headers["retry-after"] == "1"
        assert [each.result().status_code for each in first] == [200, 200]
        assert http.post(TEXT, json=BODY).status_code == 200
        server.settled()


def test_503_when_the_engine_is_closing() -> None:
    with running() as server, server.http() as http:
        server.engine.close()
        for path in (TEXT, "/v1/leyline/sessions/a/directives"):
            answer = http.post(path, json={"prompt": [5, 6, 7]})
            assert error_of(answer, 503)["code"] == "closing"
        assert http.get("/v1/leyline/sessions/a").status_code == 503
        assert http.get("/health").status_code == 503
        assert http.get("/metrics").status_code == 200


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_500_when_the_engine_fails(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request gets an error, in the stream if it has begun; the engine goes on (I7)."""
    works, passes = scheduler.forward, 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == (1 if when == "prefill" else 3):
            raise RuntimeError("no luck")
        return works(*args, **kwargs)

    with running() as server, server.http() as http:
        monkeypatch.setattr(scheduler, "forward", fails)
        body = {**BODY, "max_tokens": 8, "temperature": 0}
        assert error_of(http.post(TEXT, json=body), 500)["type"] == "server_error"
        passes = 0
        with pytest.raises(openai.APIError, match="no luck"):
            list(server.client().completions.create(model="tiny", **body, stream=True))
        assert http.post(TEXT, json=body).status_code == 200
        server.settled()


def test_500_for_what_nobody_thought_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answered in the API's shape, without the error's own text; counted."""
    with running() as server, server.http() as http:
        monkeypatch.setattr(server.engine, "submit", lambda *_: 1 / 0)
        error = error_of(http.post(TEXT, json=BODY), 500)
        assert "ZeroDivisionError" in error["message"] and "division by" not in error["message"]
        counted = {"endpoint": TEXT, "status": "500"}
        until(lambda: server.metric("leyline_requests_total", **counted) == 1)


def test_small_pieces_are_sent_at_once() -> None:
    """Connections don't wait for acknowledgements, which would be 40 ms a token."""
    import socket

    async def accepted() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = writer.get_extra_info("socket")
            found.set_result(line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(note, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                nodelay = await found
                writer.close()
                return nodelay

    assert asyncio.run(accepted()) != 0


def test_serve() -> None:
    """`serve` says where it listens, and an address that is taken is an OSError that names it."""
    with listen("127.0.0.1", 0) as taken, tiny_engine() as engine:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port}"):
            serve(engine, port=port)
        ready: list[str] = []
        asked = {"port": 0, "on_ready": ready.append, "log_level": "error"}
        threading.Thread(target=serve, args=(engine,), kwargs=asked, daemon=True).start()
        until(lambda: bool(ready))
        assert httpx.get(f"{ready[0]}/health", timeout=30).status_code == 200

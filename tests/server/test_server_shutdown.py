"""A server that stops while it is busy: every client is told (I6: no request is lost)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from tiny_server import running, until

LONG = {"prompt": list(range(5, 40)), "max_tokens": 7000, "temperature": 0, "ignore_eos": True}


def test_requests_that_take_longer_end_with_an_error() -> None:
    def ask(url: str, stream: bool) -> httpx.Response:
        body: dict[str, Any] = {**LONG, "stream": stream}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    with ThreadPoolExecutor(4) as pool:
        with running(grace_s=0.2) as server:
            asked = [pool.submit(ask, server.url, stream) for stream in (False, True) * 2]
            until(lambda: server.engine.stats().running == 4)
        answers = [each.result() for each in asked]
    for plain in answers[::2]:
        assert plain.status_code == 503
        assert plain.json()["error"]["code"] == "closing"
        assert plain.headers["retry-after"]
    for streamed in answers[1::2]:
        assert streamed.status_code == 200
        assert '"code":"closing"' in streamed.text.rstrip().splitlines()[-1]

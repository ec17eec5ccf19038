"""A front of a real server that forces the assistant's messages, as a tiny model calls no tools.

The server gets the harness's own requests, but for the number of tokens that it is to generate.
Of its answers only the message gives way to one from a script, as recorded answers are forced in a
replay; usage and report stay the engine's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from leyline.channel import Report
from leyline.client import report_of

Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """The assistant calls a tool."""

    name: str
    arguments: Json

    def message(self, number: int) -> Json:
        """number: of the answer, for an id of the call's own."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


@dataclass(frozen=True)
class Exchange:
    """A request as it came, and the answer as it went."""

    request: Json
    answer: Json

    @property
    def report(self) -> Report | None:
        return report_of(self.answer)

    @property
    def prompt(self) -> int:
        return self.answer["usage"]["prompt_tokens"]

    @property
    def cached(self) -> int:
        return self.answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@dataclass
class Forced:
    """Where a harness is to send its requests, and what went over the wire."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)


@contextmanager
def forced(url: str, script: Sequence[Call | str]) -> Iterator[Forced]:
    """Serve until the block ends; the n-th answer's message is the script's n-th. A request after
    the script's end is refused, and so is a stream.

    url: of the real server.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = len(front.exchanges)
            if self.path != "/v1/chat/completions" or body.get("stream") or number >= len(script):
                self.reply(400, {"error": {"message": f"not in the script: {self.path} {number}"}})
                return
            got = real.post(self.path, json=shortened(body))
            answer = got.json()
            if got.status_code == 200:
                force(answer, script[number], number)
                front.exchanges.append(Exchange(body, answer))
            self.reply(got.status_code, answer)

        def reply(self, status: int, answer: Json) -> None:
            raw = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    front = Forced(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=60) as real:
            yield front
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def shortened(body: Json) -> Json:
    """What is generated is thrown away, so let it be little."""
    return {k: v for k, v in body.items() if k != "max_completion_tokens"} | {"max_tokens": 2}


def force(answer: Json, said: Call | str, number: int) -> None:
    """Put the script's message into a chat completion."""
    (choice,) = answer["choices"]
    if isinstance(said, Call):
        choice["message"] = said.message(number)
        choice["finish_reason"] = "tool_calls"
    else:
        choice["message"] = {"role": "assistant", "content": said}
        choice["finish_reason"] = "stop"

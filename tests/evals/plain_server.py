"""A server that is not ours, for tests of what is asked of any."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

from other_server import serving


@contextmanager
def plain(
    refuse: list[int] | None = None,
    counts: bool = False,
    unanswered: queue.SimpleQueue[dict[str, Any]] | None = None,
) -> Iterator[str]:
    """An HTTP server of the OpenAI API that knows no sessions and counts nothing as cached, or
    with `counts` only in streams; it refuses its first completions with these codes. unanswered:
    gets the bodies of completions that are no streams, which then wait for the block's end."""
    codes, over = list(refuse or ()), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        left: ClassVar[list[int]] = codes

        def do_GET(self) -> None:
            self._say(200, {"data": [{"id": "plain"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            if not self.path.endswith("/completions"):
                self._say(404, {})
            elif self.left:
                self._say(self.left.pop(0), {"error": "busy"})
            elif unanswered is not None and not body.get("stream"):
                unanswered.put(body)
                over.wait()
            else:
                self._answer(bool(body.get("stream")))

        def _answer(self, stream: bool) -> None:
            usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}
            if counts and stream:
                usage["prompt_tokens_details"] = {"cached_tokens": 6}
            message = {"role": "assistant", "content": "a"}
            part = {"delta" if stream else "message": message, "finish_reason": "stop", "index": 0}
            value = {"id": "i", "object": "o", "created": 0, "model": "plain", "choices": [part]}
            self._say(200, {**value, "usage": usage}, stream)

        def _say(self, code: int, value: dict[str, Any], stream: bool = False) -> None:
            text = json.dumps(value)
            data = (f"data: {text}\n\ndata: [DONE]\n\n" if stream else text).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with serving(Handler) as url:
        try:
            yield url
        finally:
            over.set()

"""Bounds on what a client may send and have open."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyline.server.errors import ApiError

MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Settings:
    """How the server is set up.

    api_keys: none lets everybody in; then all clients share one space of session names.
    max_body_bytes: of a request.
    max_open: requests that one key may have open at a time, waiting ones included.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * MIB
    max_open: int = 64


async def read_body(request: Request, most: int) -> bytes:
    """The body, of at most `most` bytes. Raises ApiError 413 before there is more in memory."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise _too_large(most)
        pieces.append(piece)
    return b"".join(pieces)


STREAM_PATH = "/v1/leyline/events"
"""Open as long as somebody looks on, so it must not take a request's place; bounded by itself."""


class OpenRequestsMiddleware:
    """Bounds the requests under `/v1/` that one owner has open, to their last byte."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self.most = most
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith("/v1/") or path == STREAM_PATH:
            await self.app(scope, receive, send)
            return
        owner = scope["state"]["owner"]
        if self._open[owner] >= self.most:
            await _too_many(self.most).response()(scope, receive, send)
            return
        self._open[owner] += 1
        closed = False

        def close() -> None:
            nonlocal closed
            if closed:
                return
            closed = True
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]

        async def closing(message: Message) -> None:
            # Before its last byte goes out: who has read it may ask again at once.
            if message["type"] == "http.response.body" and not message.get("more_body"):
                close()
            await send(message)

        try:
            await self.app(scope, receive, closing)
        finally:
            close()


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the request has more than {most} bytes, which is this server's limit",
        code="request_too_large",
    )


def _too_many(most: int) -> ApiError:
    return ApiError(
        429,
        f"{most} requests of this API key are open, no more are taken; try again shortly",
        "rate_limit_error",
        code="too_many_requests",
        headers={"Retry-After": "1"},
    )

"""Requests and answers as ASGI has them: read, sent once more, refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyline.sglang.answers import Shape
from leyline.sglang.request import Refused

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

JSON = b"application/json"


async def read(receive: Receive) -> tuple[list[Message], bytes]:
    """A request's body, and the messages that it came in. If the client hangs up, the last one is
    that and the body ends there."""
    messages: list[Message] = []
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    return messages, b"".join(each.get("body", b"") for each in messages)


def replay(messages: list[Message], receive: Receive) -> Receive:
    """A `receive` that begins with these."""
    waiting = messages[::-1]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


def with_body(scope: Scope, messages: list[Message], body: bytes) -> tuple[Scope, list[Message]]:
    """The same request with another body; a client that hung up still has."""
    rest = [each for each in messages if each["type"] != "http.request"]
    headers = with_length(scope["headers"], len(body))
    return {**scope, "headers": headers}, [{"type": "http.request", "body": body}, *rest]


def with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    """Headers with the body's new length; one sent in chunks has none."""
    return [
        (name, b"%d" % length if name.lower() == b"content-length" else value)
        for name, value in headers
    ]


def error_of(shape: Shape, refused: Refused) -> tuple[bytes, dict[str, str]]:
    """An error's body and headers."""
    headers = {"content-type": JSON.decode()}
    if refused.status_code == 409:  # the official clients would try again
        headers["x-should-retry"] = "false"
    return shape.error(refused), headers


async def refuse(send: Send, shape: Shape, refused: Refused) -> None:
    """Answer with an error."""
    body, named = error_of(shape, refused)
    headers = [(name.encode(), value.encode()) for name, value in named.items()]
    headers.append((b"content-length", b"%d" % len(body)))
    start = {"type": "http.response.start", "status": refused.status_code, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})

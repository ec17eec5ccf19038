"""`/v1/messages/count_tokens` with `context_management`: SGLang's own count, of the messages as the
rules leave them and, for `original_input_tokens`, as they came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from leyline.api.anthropic_answers import OriginalTokens
from leyline.sglang import asgi

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def answer(app: ASGIApp, scope: Scope, receive: Receive, send: Send, original: bytes) -> None:
    """Answer a request that has the edited body. original: the same request without rules."""
    messages, edited_body = await asgi.read(receive)
    edited = await _ask(app, scope, receive, messages, edited_body)
    whole = await _ask(app, scope, receive, messages, original) if edited.is_count else edited
    if not whole.is_count:
        return await whole.send(send)
    out = orjson.loads(edited.body)
    tokens = orjson.loads(whole.body)["input_tokens"]
    out["context_management"] = OriginalTokens(original_input_tokens=tokens).model_dump()
    body = orjson.dumps(out)
    start = {**edited.start, "headers": asgi.with_length(edited.start["headers"], len(body))}
    await _Answer(start, body).send(send)


@dataclass(frozen=True, slots=True)
class _Answer:
    """One that is whole. start: `http.response.start`."""

    start: Any
    body: bytes

    @property
    def is_count(self) -> bool:
        return bool(self.start["status"] == 200)

    async def send(self, send: Send) -> None:
        await send(self.start)
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


async def _ask(
    app: ASGIApp, scope: Scope, receive: Receive, messages: list[Message], body: bytes
) -> _Answer:
    """What the app answers to this body."""
    sent: list[Message] = []

    async def keep(message: Message) -> None:
        sent.append(message)

    scope, messages = asgi.with_body(scope, messages, body)
    await app(scope, asgi.replay(messages, receive), keep)
    return _Answer(sent[0], b"".join(each.get("body", b"") for each in sent[1:]))

"""The top-level `leyline` object of requests to `/v1/…`, as an ASGI middleware; on `/v1/messages`
and its `/count_tokens` Anthropic's `context_management` too.

SGLang drops fields that it doesn't know. Requests without them go through untouched, and so do
bodies that are encoded (`content-encoding`), which SGLang doesn't read either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from leyline.api.anthropic_answers import AppliedEdits
from leyline.api.anthropic_messages import check_conversation
from leyline.api.context_management import apply, parse_context_management
from leyline.api.errors import FieldError, join
from leyline.api.leyline_object import LeylineObject, PolicyReport
from leyline.policy import Applied, PolicyError, apply_policy, estimate
from leyline.policy.turns import as_json
from leyline.sglang import asgi, count_tokens
from leyline.sglang.answers import Anthropic, Events, OpenAI, Shape
from leyline.sglang.carriers import KEY, is_enabled, parse_object
from leyline.sglang.request import Exchange, Refused

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MENTION = b'"leyline"'
_POLICY, _MANAGED = b'"policy"', b'"context_management"'
_CHATS = ("/v1/chat/completions", "/invocations")
_GENERATE = "/generate"
_MESSAGES = "/v1/messages"
_COUNT = "/v1/messages/count_tokens"
_RULED = (_MESSAGES, _COUNT)
SHAPES: dict[str, Callable[[], Shape]] = {
    **dict.fromkeys(_CHATS, OpenAI),
    _GENERATE: OpenAI,
    "/v1/completions": OpenAI,
    **dict.fromkeys(_RULED, Anthropic),
}
"""Of each path that is looked at."""


def add_middleware(*_: Any, **__: Any) -> None:
    """BEFORE `http_server._setup_and_run_http_server`: put the middleware into SGLang's app.

    Innermost: who has no API key has been sent away by then, and a compressed body is plain.
    """
    from sglang.srt.entrypoints.http_server import app
    from starlette.middleware import Middleware

    if not any(each.cls is LeylineMiddleware for each in app.user_middleware):
        app.user_middleware.append(Middleware(LeylineMiddleware))


class LeylineMiddleware:
    """Takes the object out of a request and puts the report into the answer."""

    def __init__(self, app: ASGIApp, enabled: Callable[[], bool] = is_enabled) -> None:
        self.app = app
        self.enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in SHAPES:
            return await self.app(scope, receive, send)
        messages, body = await asgi.read(receive)
        if _MENTION not in body and not (path in _RULED and _MANAGED in body):
            return await self.app(scope, asgi.replay(messages, receive), send)
        shape = SHAPES[path]()
        try:
            if _POLICY in body or _MANAGED in body:  # may take long: streams must not wait for it
                taken = await asyncio.to_thread(take, body, path, self.enabled)
            else:
                taken = take(body, path, self.enabled)
        except Refused as refused:
            return await asgi.refuse(send, shape, refused)
        if taken is None:
            return await self.app(scope, asgi.replay(messages, receive), send)
        if taken.body is not None:
            scope, messages = asgi.with_body(scope, messages, taken.body)
        receive = asgi.replay(messages, receive)
        if path == _COUNT:
            if taken.unmanaged is None:
                return await self.app(scope, receive, send)
            return await count_tokens.answer(self.app, scope, receive, send, taken.unmanaged)
        exchange = Exchange(taken.given)
        if taken.managed is not None and isinstance(shape, Anthropic):
            shape.managed = taken.managed
        answer = _Answer(send, shape, exchange, taken.applied)
        await self.app({**scope, KEY: exchange}, receive, answer.send)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a body had. given: the top-level object. body: the new one, where it changed. applied:
    what policies did to the messages; managed: what `context_management` did; unmanaged: the body
    that it would be without, for a count."""

    given: LeylineObject | None
    body: bytes | None = None
    applied: tuple[Applied, ...] = ()
    managed: AppliedEdits | None = None
    unmanaged: bytes | None = None


def take(body: bytes, path: str, enabled: Callable[[], bool]) -> Taken | None:
    """The object of a request; None for one without, which SGLang gets as it came. A chat's
    messages are edited by the object's policy. Raises Refused."""
    try:
        request = orjson.loads(body)  # reads what SGLang reads, and no more
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    raw = request.pop(KEY, None)
    if path == _GENERATE:
        if raw is not None:
            what = "goes into sampling_params.custom_params or kv_hints here, not to the top level."
            raise Refused.of(FieldError(KEY, what, "unsupported_parameter"))
        return None
    rules = request.pop("context_management", None) if path in _RULED else None
    if raw is None and rules is None:
        custom = request.get("custom_params")
        return Taken(None) if isinstance(custom, dict) and KEY in custom else None
    try:
        given = None if raw is None else parse_object(raw, enabled())
        applied: tuple[Applied, ...] = ()
        plain = dict(request) if rules is not None and path == _COUNT else None
        managed = None if rules is None else _manage(rules, request)
        if given is not None and given.policy is not None:
            applied = _apply_policy(given.policy, request, path)
            if plain is not None:
                _apply_policy(given.policy, plain, path)
            given = given.model_copy(update={"policy": None})
        elif managed is None:
            return Taken(given)
        unmanaged = None if plain is None else orjson.dumps(plain)
        return Taken(given, orjson.dumps(request), applied, managed, unmanaged)
    except FieldError as error:
        raise Refused.of(error) from None
    except (RecursionError, orjson.JSONEncodeError):
        raise Refused.of(FieldError("", "the body is nested too deeply.")) from None


def _manage(rules: Any, request: dict[str, Any]) -> AppliedEdits:
    """Edit a request's messages by its `context_management`. Tokens are estimated: the tokenizer is
    in another process."""
    checked = parse_context_management(rules)
    messages = check_conversation(request.get("messages"))
    front = [request[name] for name in ("system", "tools") if request.get(name) is not None]
    head = sum(estimate(each if isinstance(each, str) else as_json(each)) for each in front)
    edited = apply(checked, messages, estimate, head)
    request["messages"] = edited.messages
    return AppliedEdits(applied_edits=list(edited.applied))


def _apply_policy(policy: Any, request: dict[str, Any], path: str) -> tuple[Applied, ...]:
    if path == "/v1/completions":
        what = "edits messages, and a completion has none."
        raise FieldError(f"{KEY}.policy", what)
    if not isinstance(request.get("messages"), list):
        return ()  # for SGLang to refuse
    try:
        edited = apply_policy(policy, request["messages"])
    except PolicyError as error:
        field = error.field
        where = field if field.startswith("messages") else join(KEY, field)
        raise FieldError(where, error.message, "invalid_policy") from None
    request["messages"] = edited.messages
    return edited.applied


class _Answer:
    """The answer on its way to the client: a report is put in; a failure takes its place, as long
    as nothing was sent."""

    def __init__(
        self, send: Send, shape: Shape, exchange: Exchange, applied: tuple[Applied, ...]
    ) -> None:
        self._send = send
        self._shape = shape
        self._exchange = exchange
        self._policy = [PolicyReport.of(each).model_dump() for each in applied]
        self._start: Message | None = None
        """Held until the first of the body: then it is known whether there is a failure."""
        self._write: Callable[[bytes, bool], Any] = self._plain
        self._pieces: list[bytes] = []
        self._events = Events()
        self._is_over = False

    async def send(self, message: Message) -> None:
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self._start = message
            self._write = self._writer(message)
            return
        if message["type"] != "http.response.body":
            await self._begin()
            await self._send(message)
            return
        if self._start is not None and self._exchange.failure is not None:
            self._is_over = True
            await asgi.refuse(self._send, self._shape, self._exchange.failure)
            return
        await self._write(message.get("body", b""), message.get("more_body", False))

    def _writer(self, start: Message) -> Callable[[bytes, bool], Any]:
        headers = dict(start["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if start["status"] != 200 or b"content-encoding" in headers:
            return self._plain
        kinds = {b"application/json": self._whole, b"text/event-stream": self._streamed}
        return kinds.get(kind, self._plain)

    @property
    def _report(self) -> dict[str, Any] | None:
        """The engine's, with what was done here."""
        report = self._exchange.report
        return {**report, "policy": self._policy} if report and self._policy else report

    async def _begin(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)

    async def _plain(self, piece: bytes, more: bool) -> None:
        await self._begin()
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    async def _whole(self, piece: bytes, more: bool) -> None:
        self._pieces.append(piece)
        if more:
            return
        body, report = b"".join(self._pieces), self._report
        if (report is not None or self._shape.managed is not None) and self._start is not None:
            answer = orjson.loads(body)
            self._shape.whole(answer, report)
            body = orjson.dumps(answer)
            headers = asgi.with_length(self._start["headers"], len(body))
            self._start = {**self._start, "headers": headers}
        await self._plain(body, False)

    async def _streamed(self, piece: bytes, more: bool) -> None:
        await self._begin()
        events = self._events.feed(piece)
        if not more:
            events += [self._events.rest(), b""]
        report = self._report
        out = b"".join(part for event in events for part in self._shape.event(event, report))
        if out or not more:
            await self._plain(out, more)

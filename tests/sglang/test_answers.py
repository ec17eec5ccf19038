"""The top-level `leyline` object in bodies and answers as bytes: no server, no model."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leyline.sglang.answers import Anthropic, Events, OpenAI
from leyline.sglang.http import LeylineMiddleware, take
from leyline.sglang.request import Exchange, Refused

pytestmark = pytest.mark.sglang

CHAT = "/v1/chat/completions"
CLEAR = {"name": "clear_tool_outputs", "keep": 1}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "please read the first of the files and then the second one"},
    {"role": "assistant", "content": "i am reading it"},
    {"role": "tool", "content": "a long output, long enough to be cleared", "tool_call_id": "1"},
    {"role": "tool", "content": "a short one", "tool_call_id": "2"},
]
REPORT = {
    "session": "s",
    "edits": [],
    "tokens": {"prompt": 30, "shared": 11, "moved": 9, "computed": 10},
    "fallback": None,
    "splice_ms": 0.1,
    "copied": False,
    "forgotten": 0,
    "kept_by_others": 0,
}


# --- an answer as a stream ------------------------------------------------------------------------


def chunk(text: str = "", reason: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
    return b"data: " + orjson.dumps({"id": "1", "choices": [choice]}) + b"\n\n"


USAGE = (
    b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":30,"prompt_tokens_details":null}}\n\n'
)
IDS = b'event: sglext_ids\ndata: {"id":"1","choices":[]}\n\n'
DONE = b"data: [DONE]\n\n"


def streamed(events: list[bytes], report: dict[str, Any] | None) -> list[list[bytes]]:
    """What an OpenAI stream gives out for each event that comes in, and at its end."""
    shape = OpenAI()
    return [list(shape.event(event, report)) for event in [*events, b""]]


def data(event: bytes) -> dict[str, Any]:
    return json.loads(event.split(b"data: ", 1)[1])


@pytest.mark.parametrize(
    ("tail", "last"),
    [
        ([chunk(reason="stop"), DONE], 0),
        ([chunk("x", "length"), DONE], 0),
        ([chunk(reason="stop"), USAGE, DONE], 1),
        ([chunk(reason="stop"), chunk(reason="stop", index=1), DONE], 1),
        ([chunk(reason="stop"), USAGE, IDS, DONE], 1),
        ([chunk(reason="stop")], 0),
    ],
)
def test_report_stands_in_the_last_chunk_and_only_there(tail: list[bytes], last: int) -> None:
    events = [chunk("a"), chunk("b"), *tail]
    out = [event for step in streamed(events, REPORT) for event in step]
    assert len(out) == len(events)
    for i, (before, after) in enumerate(zip(events, out, strict=True)):
        if i != 2 + last:
            assert after == before
    reported = data(out[2 + last])
    assert reported.pop("leyline") == REPORT
    if reported.get("usage"):
        assert reported["usage"]["prompt_tokens_details"] == {"cached_tokens": 20}
    else:
        assert reported == data(events[2 + last])


def test_text_is_never_held_back() -> None:
    events = [chunk("a"), chunk('"finish_reason":null'), chunk("b", "stop", 1), chunk("c"), DONE]
    steps = streamed(events, REPORT)
    assert steps[0] == [events[0]] and steps[1] == [events[1]]
    assert steps[3] == [events[2], events[3]], "an ended choice waits for the next chunk, no longer"


def test_stream_without_a_report_stays_as_it_is() -> None:
    events = [chunk("a"), chunk(reason="stop"), USAGE, IDS, DONE]
    assert [event for step in streamed(events, None) for event in step] == events
    error = b'data: {"error":{"message":"no"}}\n\n'
    out = [event for step in streamed([chunk("a"), error, DONE], REPORT) for event in step]
    assert out == [chunk("a"), error, DONE]


@given(
    st.lists(st.binary(max_size=20).map(lambda text: text.replace(b"\n", b"x") + b"\n\n")),
    st.lists(st.integers(0, 200)),
)
@example([b"\0\n\n", b"\n\n"], [4])
@example([b"\n\n"], [1])
def test_events_are_the_same_however_the_bytes_are_cut(
    events: list[bytes], cuts: list[int]
) -> None:
    whole = b"".join(events) + b"rest"
    at = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    cutter, out = Events(), []
    for start, end in pairwise(at):
        out += cutter.feed(whole[start:end])
    assert out == events
    assert cutter.rest() == b"rest"


def test_anthropic_reports_with_the_stop_reason_and_splits_the_input() -> None:
    start = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":30}}}\n\n'
    text = b'event: content_block_delta\ndata: {"delta":{"text":"message_delta"}}\n\n'
    end = b'event: message_delta\ndata: {"delta":{"stop_reason":"end_turn"}}\n\n'
    shape = Anthropic()
    out = [event for each in (start, text, end, b"") for event in shape.event(each, REPORT)]
    assert data(out[0])["message"]["usage"] == {"input_tokens": 10, "cache_read_input_tokens": 20}
    assert out[1] == text
    assert data(out[2]) == {**data(end), "leyline": REPORT}
    reported = {"usage": {"input_tokens": 12, "cache_read_input_tokens": 18}}
    shape.whole(reported, REPORT)
    assert reported["usage"] == {"input_tokens": 12, "cache_read_input_tokens": 18}


# --- requests -------------------------------------------------------------------------------------


def test_only_a_top_level_object_is_taken() -> None:
    for body in (
        b"{",
        b'["leyline"]',
        b'{"leyline": null}',
        b'{"messages": [{"content": "leyline"}]}',
        b'{"metadata": {"leyline": {}}}',
    ):
        assert take(body, CHAT, lambda: True) is None, body
    taken = take(b'{"leyline": {"session": "s"}, "x": 1}', CHAT, lambda: True)
    assert taken is not None and taken.given is not None
    assert taken.given.session == "s"
    assert taken.body is None, "SGLang gets the body as it came"
    carried = take(b'{"custom_params": {"leyline": 3}}', CHAT, lambda: True)
    assert carried is not None and carried.given is None


def test_policy_edits_the_messages_and_nothing_else() -> None:
    body = {
        "leyline": {"session": "s", "policy": CLEAR},
        "messages": TURNS,
        "seed": 2**62,
        "é": "\u2028",
    }
    taken = take(json.dumps(body).encode(), CHAT, lambda: True)
    assert taken is not None and taken.given is not None and taken.body is not None
    assert taken.given.policy is None
    edited = json.loads(taken.body)
    assert edited.pop("messages") == [
        *TURNS[:2],
        {**TURNS[2], "content": "[evicted: old tool output]"},
        *TURNS[3:],
    ]
    assert edited == {"seed": 2**62, "é": "\u2028"}


@pytest.mark.parametrize(
    ("path", "leyline", "param", "code"),
    [
        (CHAT, 3, "leyline", "invalid_value"),
        (CHAT, {}, "leyline.session", "missing_required_parameter"),
        (CHAT, {"session": "s", "typo": 1}, "leyline.typo", "unknown_parameter"),
        (CHAT, {"session": "s", "policy": {"name": "x"}}, "leyline.policy.name", "invalid_policy"),
        (CHAT, {"session": "s", "policy": {**CLEAR, "keep": -1}}, "leyline.policy.keep", None),
        ("/v1/completions", {"session": "s", "policy": CLEAR}, "leyline.policy", None),
    ],
)
def test_malformed_object_is_refused_by_its_field(
    path: str, leyline: object, param: str, code: str | None
) -> None:
    with pytest.raises(Refused) as refused:
        take(json.dumps({"leyline": leyline, "messages": TURNS}).encode(), path, lambda: True)
    assert refused.value.status_code == 400
    assert refused.value.param == param
    assert str(refused.value).startswith(f"{param}: ")
    assert code is None or refused.value.code == code


@pytest.mark.parametrize(
    ("managed", "messages"),
    [
        (3, TURNS[:1]),
        ({"edits": [{"type": "clear_tool_uses_20250919", "keep": -1}]}, TURNS[:1]),
        ({"edits": []}, None),
        ({"edits": []}, [3]),
        ({"edits": []}, [{"role": "user", "content": [{"type": "image"}]}]),
        ('{"edits": ' + "[" * 900 + "]" * 900 + "}", TURNS[:1]),
    ],
)
def test_malformed_context_management_is_a_sentence(managed: object, messages: object) -> None:
    given = managed if isinstance(managed, str) else json.dumps(managed)
    body = f'{{"context_management": {given}, "messages": {json.dumps(messages)}}}'
    with pytest.raises(Refused) as refused:
        take(body.encode(), "/v1/messages", lambda: True)
    assert refused.value.status_code == 400 and len(str(refused.value)) < 300


def test_context_management_elsewhere_is_sglangs() -> None:
    assert take(b'{"context_management": 3}', CHAT, lambda: True) is None


@pytest.mark.parametrize("depth", [300, 900])
@pytest.mark.parametrize("where", ["name", "keep", "messages"])
def test_deep_nesting_is_a_sentence_not_a_crash(where: str, depth: int) -> None:
    deep = f'{{"{where}": ' + '{"a":' * depth + "1" + "}" * depth
    policy, content = f'{deep}, "name": "clear_tool_outputs"}}', '"x"'
    if where == "name":
        policy = f"{deep}}}"
    elif where == "messages":
        policy, content = json.dumps(CLEAR), f"{deep}}}"
    body = f"""{{"messages": [{{"role": "user", "content": {content}}}],
        "leyline": {{"session": "s", "policy": {policy}}}}}"""
    with pytest.raises(Refused) as refused:
        take(body.encode(), CHAT, lambda: True)
    assert len(str(refused.value)) < 300


class Wire:
    """An ASGI client: what comes in, message by message, and what goes out."""

    def __init__(self, *pieces: bytes, gone: bool = False) -> None:
        self.waiting: list[dict[str, Any]] = [
            {"type": "http.request", "body": piece, "more_body": gone or i < len(pieces) - 1}
            for i, piece in enumerate(pieces)
        ]
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> Any:
        return self.waiting.pop(0) if self.waiting else {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))

    def post(self, app: Any, path: str = CHAT) -> None:
        length = b"%d" % sum(len(each["body"]) for each in self.waiting)
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/root{path}",
            "root_path": "/root",
            "headers": [(b"content-type", b"application/json"), (b"content-length", length)],
        }
        asyncio.run(LeylineMiddleware(app, lambda: True)(scope, self.receive, self.send))


@pytest.mark.parametrize("pieces", [(b'{"messages":', b"[]}"), (b'{"a": "leyline"}',), (b"",)])
def test_request_without_the_object_goes_through_untouched(pieces: tuple[bytes, ...]) -> None:
    """I1"""
    got: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert "leyline" not in scope
        for _ in range(len(pieces) + 1):
            got.append(await receive())
        assert send == wire.send, "the answer does not pass through Leyline"

    wire = Wire(*pieces)
    messages = list(wire.waiting)
    wire.post(app)
    assert got == [*messages, {"type": "http.disconnect"}]


def test_hanging_up_while_sending_reaches_the_application() -> None:
    got: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.extend([await receive(), await receive(), await receive()])

    Wire(b'{"leyline": {"session"', gone=True).post(app)
    assert [each["type"] for each in got] == ["http.request", "http.disconnect", "http.disconnect"]


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_object_is_found_however_the_body_is_cut(cut: int) -> None:
    body = json.dumps({"messages": TURNS, "leyline": {"session": "é", "policy": CLEAR}}).encode()
    got: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert dict(scope["headers"])[b"content-length"] == b"%d" % len(message["body"])
        got.update(json.loads(message["body"]), session=scope["leyline"].given.session)
        assert (await receive())["type"] == "http.disconnect"

    Wire(*(body[i : i + cut] for i in range(0, len(body), cut))).post(app)
    assert got["session"] == "é" and "leyline" not in got
    assert got["messages"][2]["content"] == "[evicted: old tool output]"


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream; charset=utf-8"])
def test_failure_takes_the_place_of_an_answer_that_has_not_begun(kind: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange: Exchange = scope["leyline"]
        exchange.failure = Refused("nothing is cached", 409, "leyline.strict", "source_missing")
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        )
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    wire = Wire(b'{"leyline": {"session": "s"}}')
    wire.post(app)
    start, body = wire.sent
    headers = dict(start["headers"])
    assert start["status"] == 409
    assert headers[b"x-should-retry"] == b"false"
    assert headers[b"content-length"] == b"%d" % len(body["body"])
    assert json.loads(body["body"])["error"]["code"] == "source_missing"

"""Errors of Anthropic's routes: each in the API's shape, with one sentence; keys and limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from tiny_claude import CALL, HELLO, TOOL, ask, client_of
from tiny_server import Running, running

from leyline.server.limits import Settings


@pytest.fixture
def claude(server: Running) -> Anthropic:
    return client_of(server)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}
TEXT = {"type": "text", "text": "x"}
TOLD = {"role": "system", "content": "be quick"}


def said(*blocks: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": list(blocks)}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("model", 5),
        ("temperature", 3),
        ("temperature", "1"),
        ("top_p", 1.5),
        ("top_k", -2),
        ("stream", "yes"),
        ("stop", "x"),
        ("stop_sequences", "x"),
        ("stop_sequences[1]", ["a", ""]),
        ("stop_sequences", ["a"] * 65),
        ("system", 5),
        ("system[0].type", [IMAGE]),
        ("system[0].text", [{"type": "text"}]),
        ("tools", {}),
        ("tools[0]", ["run"]),
        ("tools[0].name", [{"input_schema": {}}]),
        ("tools[0].input_schema", [{"name": "run"}]),
        ("tools[0].description", [{**TOOL, "description": 5}]),
        ("tools[0].type", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("tool_choice", {"type": "any"}),
        ("tool_choice", {"type": "tool", "name": "run"}),
        ("tool_choice", "auto"),
        (
            "tool_choice.disable_parallel_tool_use",
            {"type": "auto", "disable_parallel_tool_use": True},
        ),
        ("thinking", True),
        ("thinking.type", {"type": "maybe"}),
        ("mcp_servers", [{"name": "x"}]),
        ("output_config", {"format": {"type": "json_schema"}}),
        ("container", "x"),
        ("speed", "fast"),
        ("chat_template_kwargs.tokenize", {"tokenize": True}),
        ("context_management", []),
        ("context_management.edits[0].type", {"edits": [{"type": "compact_20260112"}]}),
        ("messages", None),
        ("messages", []),
        ("messages", "hi"),
        ("messages[0]", ["hi"]),
        ("messages[0].role", [{"role": "tool", "content": "x"}]),
        ("messages[0].content", [{"role": "user", "content": None}]),
        ("messages[0].content", said()),
        ("messages[0].content[0]", said("hi")),
        ("messages[0].content[0].type", said(IMAGE)),
        ("messages[0].content[0].type", said({"type": "document", "source": {}})),
        ("messages[0].content[0].type", said(CALL)),
        ("messages[0].content[0].type", said({"text": "hi"})),
        ("messages[0].content[0].text", said({"type": "text", "text": 5})),
        ("messages[0].content[0].tool_use_id", said(RESULT)),
        ("messages[0].content[0].tool_use_id", said({"type": "tool_result"})),
        ("messages[0].content[0].is_error", said({**RESULT, "is_error": "no"})),
        ("messages[0].content[0].content", said({**RESULT, "content": 5})),
        ("messages[0].content[0].content[0].type", said({**RESULT, "content": [IMAGE]})),
        ("messages[0].content[0]", [*said(CALL, role="assistant"), *HELLO]),
        (
            "messages[0].content[1]",
            [*said(CALL, {**CALL, "id": "t2"}, role="assistant"), *said(RESULT)],
        ),
        ("messages[0].content[0]", [*said(CALL, role="assistant"), TOLD]),
        ("messages[0].content[0]", [*said(CALL, role="assistant"), TOLD, *said(TEXT)]),
        ("messages[0].content[1].id", [*said(CALL, CALL, role="assistant"), *said(RESULT)]),
        ("messages[1].content[0]", [*said(CALL, role="assistant"), *said(TEXT, RESULT)]),
        ("messages[1].content", [*said(CALL, role="assistant"), *HELLO, *said(RESULT)]),
        ("messages[1].content", [*said(CALL, role="assistant"), TOLD, *said(RESULT)]),
        ("messages[0].content[0].input", said({**CALL, "input": "ls"}, role="assistant")),
        ("messages[0].content[0].thinking", said({"type": "thinking"}, role="assistant")),
        ("messages[1]", [*HELLO, {"role": "assistant", "content": "The answer is"}]),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens?beta=true"])
def test_bad_fields_are_named(server: Running, path: str, field: str, value: Any) -> None:
    """I6: one sentence, never ignored, in the API's shape."""
    if "count" in path and (field.startswith("stop_seq") or (field, value) == ("max_tokens", None)):
        return  # a count needs none of it
    body = {"messages": HELLO, "max_tokens": 3, "stream": True}
    body[field.split("[")[0].split(".")[0]] = value
    with server.http() as http:
        error = error_of(http.post(path, json=body), 400, "invalid_request_error")
    assert error.startswith(f"{field}: ") and error.endswith(".")


def error_of(answer: httpx.Response, status: int, kind: str) -> str:
    """The message of an error that looks as Anthropic's do."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
    return body["error"]["message"]


def test_other_errors_have_the_apis_shape(server: Running, claude: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'other' does not exist"):
        ask(claude, model="other")
    with server.http() as http:
        for body in (b"", b"[]", b'{"messages": NaN}', b"\xff", b"[" * 100_000):
            error_of(http.post("/v1/messages", content=body), 400, "invalid_request_error")
        error_of(http.get("/v1/messages"), 405, "invalid_request_error")
        error_of(http.post("/v1/messages/batches"), 404, "not_found_error")
        assert "param" in http.post("/v1/messagesx").json()["error"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    settings = Settings(api_keys=("key-a", "key-b"), max_body_bytes=2000, max_open=1)
    with running(settings=settings) as server:
        yield server


def test_keys(guarded: Running) -> None:
    """`x-api-key` and `Authorization` are the same key to a session; each route takes either."""
    more: dict[str, Any] = {"extra_body": {"leyline": {"session": "s"}}, "max_tokens": 1}
    ask(client_of(guarded, api_key="key-a"), **more)
    assert ask(client_of(guarded, auth_token="key-a"), **more).usage.input_tokens == 1
    with httpx.Client(base_url=guarded.url) as http:
        path = "/v1/leyline/sessions/s"
        assert http.get(path, headers={"x-api-key": "key-a"}).status_code == 200
        assert http.get(path, headers={"x-api-key": "key-b"}).status_code == 404
        for headers in (
            {},
            {"x-api-key": ""},
            {"x-api-key": "key-c"},
            {"x-api-key": "Bearer key-a"},
        ):
            answer = http.post("/v1/messages", headers=headers, json={})
            assert "key-a" not in error_of(answer, 401, "authentication_error")
        both = {"authorization": "Bearer key-c", "x-api-key": "key-a"}
        error_of(http.post("/v1/messages", headers=both), 401, "authentication_error")
    with pytest.raises(anthropic.AuthenticationError):
        ask(client_of(guarded, api_key="key-c"))


def test_limits(guarded: Running) -> None:
    key = {"x-api-key": "key-a"}
    with httpx.Client(base_url=guarded.url, headers=key) as http:
        answer = http.post("/v1/messages", content=b"x" * 3000)
        assert "2000" in error_of(answer, 413, "request_too_large")
        stream = ask(
            client_of(guarded), max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        with stream:
            next(stream)
            answer = http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 1})
            error_of(answer, 429, "rate_limit_error")
            assert answer.headers["retry-after"] == "1"
    guarded.settled()  # the client hung up, which ends its request

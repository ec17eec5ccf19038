"""The top-level `leyline` object over HTTP: OpenAI's chat and completions, Anthropic's messages."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from harness import Server

pytestmark = pytest.mark.sglang

CHAT = "/v1/chat/completions"
STRANGER = {"session": "http-never", "strict": True, "directives": [{"start": 0, "end": 1}]}
"""Asks for an edit in a session that has nothing."""
OUTPUT = " ".join(f"row {i} of the table" for i in range(40))
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "please read the first of the files and then the second one"},
    {"role": "assistant", "content": "i am reading it"},
    {"role": "tool", "content": OUTPUT, "tool_call_id": "1"},
    {"role": "assistant", "content": "this is a long answer about the first of the two files " * 3},
    {"role": "tool", "content": "the other output is short", "tool_call_id": "2"},
    {"role": "user", "content": "what do they say, and which of the two was longer?"},
]
CLEAR = {"name": "clear_tool_outputs", "keep": 1}


def only(answer: Any) -> dict[str, Any]:
    """The report of an SDK's object, which keeps unknown fields."""
    report = answer.model_extra["leyline"]
    tokens = report["tokens"]
    assert tokens["prompt"] == tokens["shared"] + tokens["moved"] + tokens["computed"]
    return report


def cached_of(report: dict[str, Any]) -> int:
    return report["tokens"]["shared"] + report["tokens"]["moved"]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.openai()


@pytest.fixture
def messages(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, turns: Any = TURNS, leyline: Any = None, **fields: Any) -> Any:
    extra = {} if leyline is None else {"leyline": leyline}
    return client.chat.completions.create(
        model="tiny", messages=turns, max_tokens=4, temperature=0, extra_body=extra, **fields
    )


def test_policy_is_spliced_and_reported_in_a_chat(client: openai.OpenAI) -> None:
    first = only(chat(client, leyline={"session": "http-policy"}))
    assert first["session"] == "http-policy" and first["edits"] == []
    answer = chat(client, leyline={"session": "http-policy", "policy": CLEAR})
    report = only(answer)
    assert report["fallback"] is None
    assert report["edits"] and report["tokens"]["moved"] > 0
    (did,) = report["policy"]
    assert did["name"] == CLEAR["name"] and did["tool_uses"] and did["tokens"] > 0
    assert first["policy"] == []
    assert answer.usage.prompt_tokens == report["tokens"]["prompt"] < first["tokens"]["prompt"]
    assert answer.usage.prompt_tokens_details.cached_tokens == cached_of(report)


@pytest.mark.parametrize("usage", [False, True])
def test_streamed_chat_reports_once_in_its_last_chunk(client: openai.OpenAI, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(chat(client, leyline={"session": "http-stream"}, stream=True, **options))
    plain = chat(client).choices[0].message.content
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == plain
    assert [i for i, each in enumerate(chunks) if "leyline" in each.model_extra] == [
        len(chunks) - 1
    ]
    report = only(chunks[-1])
    if usage:
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == cached_of(report)
    else:
        assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_one_prompt_share_its_report(client: openai.OpenAI, stream: bool) -> None:
    session = f"http-n-{stream}"
    only(chat(client, leyline={"session": session}))
    leyline = {"session": session, "policy": CLEAR}
    answer = chat(client, leyline=leyline, n=3, stream=stream)
    if stream:
        chunks = list(answer)
        assert {each.choices[0].index for each in chunks} == {0, 1, 2}
        reports = [only(each) for each in chunks if "leyline" in each.model_extra]
    else:
        assert len(answer.choices) == 3
        reports = [only(answer)]
        assert answer.usage.prompt_tokens_details.cached_tokens == cached_of(reports[0])
    assert len(reports) == 1
    assert reports[0]["edits"] and reports[0]["tokens"]["moved"] > 0, (
        "the edit, not what came after"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_completions(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.completions.create(
        model="tiny",
        prompt="the files of the table",
        max_tokens=4,
        stream=stream,
        extra_body={"leyline": {"session": f"http-completions-{stream}"}},
    )
    chunks = list(answer) if stream else [answer]
    assert ["leyline" in each.model_extra for each in chunks[:-1]] == [False] * (len(chunks) - 1)
    assert only(chunks[-1])["session"] == f"http-completions-{stream}"


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages(messages: anthropic.Anthropic, stream: bool) -> None:
    fields: Any = {
        "model": "tiny",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "the files of the table, the files of the table"}],
        "extra_body": {"leyline": {"session": f"http-messages-{stream}"}},
    }
    messages.messages.create(**fields)
    if stream:
        events = list(messages.messages.create(stream=True, **fields))
        begin = next(each for each in events if each.type == "message_start")
        (end,) = [each for each in events if "leyline" in (each.model_extra or {})]
        assert end.type == "message_delta" and end.delta.stop_reason == "max_tokens"
        report, usage = only(end), begin.message.usage
    else:
        answer = messages.messages.create(**fields)
        report, usage = only(answer), answer.usage
    assert usage.cache_read_input_tokens == cached_of(report) > 0
    assert usage.input_tokens + cached_of(report) == report["tokens"]["prompt"]


def uses(n: int) -> list[Any]:
    """A conversation with so many tool uses."""
    turns: list[Any] = [{"role": "user", "content": "list the files"}]
    for i in range(n):
        call = {"type": "tool_use", "id": f"t{i}", "name": "run", "input": {"command": "ls"}}
        output = f"file {i} of the table " * 12
        result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": output}
        turns.append({"role": "assistant", "content": [{"type": "text", "text": "on"}, call]})
        turns.append({"role": "user", "content": [result]})
    return turns


CLEAR_USES = {
    "edits": [
        {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "tool_uses", "value": 2},
            "keep": {"type": "tool_uses", "value": 1},
        }
    ]
}


@pytest.mark.parametrize("stream", [False, True])
def test_context_management(server: Server, messages: anthropic.Anthropic, stream: bool) -> None:
    """In a session, clearing costs no cached row behind what is cleared."""
    server.flush()  # a session would take what plain requests have computed exactly
    session = {"leyline": {"session": f"http-managed-{stream}"}}

    def ask(n: int, extra: dict[str, Any], managed: bool = True) -> Any:
        return messages.beta.messages.create(
            model="tiny",
            max_tokens=4,
            messages=uses(n),
            betas=["context-management-2025-06-27"],
            context_management=CLEAR_USES if managed else anthropic.NOT_GIVEN,
            extra_body=extra,
            stream=stream,
        )

    def last(answer: Any) -> Any:
        if not stream:
            return answer
        (end,) = [event for event in answer if event.type == "message_delta"]
        return end

    whole = last(ask(3, {}, managed=False))
    assert whole.context_management is None
    first = last(ask(2, session))
    assert first.context_management.applied_edits == []
    then = last(ask(3, session))
    (edit,) = then.context_management.applied_edits
    assert edit.type == "clear_tool_uses_20250919" and edit.cleared_tool_uses == 2
    report = only(then)
    assert report["fallback"] is None and report["edits"] and report["tokens"]["moved"] > 0
    plain = last(ask(3, {}))
    assert plain.context_management.applied_edits == [edit]
    assert "leyline" not in (plain.model_extra or {})


def test_count_tokens_after_the_edits(messages: anthropic.Anthropic) -> None:
    """As it counts a client's own edited messages; and as they came."""
    counted: Any = dict(model="tiny", messages=uses(3), system="you are careful")

    def count(**fields: Any) -> Any:
        return messages.beta.messages.count_tokens(**{**counted, **fields})

    plain = count()
    assert plain.context_management is None
    beta = {"betas": ["context-management-2025-06-27"]}
    cleared = count(context_management=CLEAR_USES, **beta)
    assert cleared.context_management.original_input_tokens == plain.input_tokens
    by_hand = json.loads(json.dumps(uses(3)))
    results = [
        block
        for message in by_hand
        for block in message["content"]
        if isinstance(block, dict) and block["type"] == "tool_result"
    ]
    for block in results[:2]:
        block["content"] = "[cleared: old tool result]"
    assert cleared.input_tokens == count(messages=by_hand).input_tokens < plain.input_tokens
    # The prompt of a request has as many.
    asked = messages.beta.messages.create(
        max_tokens=1, context_management=CLEAR_USES, **counted, **beta
    )
    usage = asked.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == cleared.input_tokens


def test_count_tokens_with_a_policy(messages: anthropic.Anthropic) -> None:
    """The `leyline` object's comes behind the rules, and is in both counts."""
    clear = {"name": "clear_tool_outputs", "keep": 0}
    leyline = {"leyline": {"session": "http-count", "policy": clear}}
    counted: Any = dict(model="tiny", messages=uses(3), extra_body=leyline)
    policy = messages.messages.count_tokens(**counted)
    both = messages.beta.messages.count_tokens(
        context_management=CLEAR_USES, betas=["context-management-2025-06-27"], **counted
    )
    plain = messages.messages.count_tokens(model="tiny", messages=uses(3))
    assert policy.input_tokens < plain.input_tokens
    assert both.context_management.original_input_tokens == policy.input_tokens
    assert "leyline" not in (both.model_extra or {})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"context_management": {"edits": [{"type": "clear_all"}]}}, r"edits\[0\]"),
        ({"leyline": {"session": 3}}, "leyline.session"),
    ],
    ids=["rules", "object"],
)
def test_malformed_counts(
    messages: anthropic.Anthropic, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=match):
        messages.messages.count_tokens(model="tiny", messages=uses(1), extra_body=fields)


def test_counts_that_sglang_refuses_are_its_own(server: Server) -> None:
    """Its error comes through, once."""
    for extra in ({}, {"context_management": CLEAR_USES}):
        body = {"messages": uses(1), **extra}  # without a model
        answer = server.http.post("/v1/messages/count_tokens", json=body)
        assert answer.status_code == 400 and answer.json()["type"] == "error"
        assert "model" in answer.json()["error"]["message"]


def test_policy_on_anthropics_messages(messages: anthropic.Anthropic) -> None:
    leyline = {
        "session": "http-messages-policy",
        "policy": {"name": "clear_tool_outputs", "keep": 1},
    }
    fields: Any = {"model": "tiny", "max_tokens": 4, "extra_body": {"leyline": leyline}}
    messages.messages.create(messages=uses(2), **fields)
    report = only(messages.messages.create(messages=uses(3), **fields))
    assert report["policy"][0]["tool_uses"] == 2
    assert report["fallback"] is None and report["edits"] and report["tokens"]["moved"] > 0


def test_malformed_context_management(messages: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"edits\[0\]"):
        messages.messages.create(
            model="tiny",
            max_tokens=4,
            messages=uses(1),
            extra_body={"context_management": {"edits": [{"type": "clear_all"}]}},
        )


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS[-1:]},
    "/v1/completions": {"prompt": "the files of the table"},
    "/v1/messages": {"messages": TURNS[-1:]},
}


def post(server: Server, path: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 2, **BODIES[path], **fields}
    return server.http.post(path, json=body)


def problem(path: str, answer: httpx.Response) -> dict[str, Any]:
    """The error object of an answer, in the shape of its API."""
    body = answer.json()
    assert (body.get("type") == "error") == (path == "/v1/messages")
    return body["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_malformed_object_gets_400_and_changes_nothing(
    server: Server, path: str, stream: bool
) -> None:
    """I6"""
    answer = post(server, path, stream=stream, leyline={"session": 3})
    assert answer.status_code == 400
    message = problem(path, answer)["message"]
    assert message.startswith("leyline.session: must be")
    assert len(message.splitlines()) == 1
    assert post(server, path, stream=stream).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_attention_is_refused(server: Server, path: str) -> None:
    """I6: only the embedded engine can say it, so nobody waits for it here in vain."""
    answer = post(server, path, leyline={"session": "a", "attention": True})
    assert answer.status_code == 400
    assert problem(path, answer)["message"].startswith("leyline.attention: is not known here")
    fine = post(server, path, leyline={"session": "a", "attention": False})
    assert fine.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_directive_outside_the_source_gets_400(server: Server, path: str, stream: bool) -> None:
    """I6: what only the scheduler can tell is a status too, streamed or not."""
    session = f"http-outside-{path}-{stream}"
    assert post(server, path, leyline={"session": session}).status_code == 200
    directives = [{"start": 0, "end": 100_000}]
    answer = post(
        server, path, stream=stream, leyline={"session": session, "directives": directives}
    )
    assert answer.status_code == 400
    assert "directives[0].end" in problem(path, answer)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_strict_fallback_gets_409(server: Server, path: str, stream: bool) -> None:
    """I6"""
    answer = post(server, path, stream=stream, leyline=STRANGER)
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    error = problem(path, answer)
    assert error["message"]
    if path != "/v1/messages":
        assert error["code"] == "source_missing" and error["param"] == "leyline.strict"


def test_sdks_raise_their_own_errors(client: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, leyline={"session": "s", "policy": {"name": "no"}}, stream=True)
    assert refused.value.param == "leyline.policy.name"
    with pytest.raises(openai.ConflictError) as conflict:
        chat(client, leyline=STRANGER, stream=True)
    assert conflict.value.code == "source_missing"
    with pytest.raises(anthropic.ConflictError):
        messages.messages.create(
            model="tiny",
            max_tokens=2,
            messages=[{"role": "user", "content": "hello"}],
            extra_body={"leyline": STRANGER},
        )


def test_several_prompts_in_one_session_are_refused(server: Server) -> None:
    answer = post(server, "/v1/completions", prompt=["a", "b"], leyline={"session": "s"})
    assert answer.status_code == 400
    assert "one at a time" in answer.json()["error"]["message"]
    single = post(server, "/v1/completions", prompt=["a"], leyline={"session": "http-one"})
    assert single.status_code == 200 and single.json()["leyline"]["session"] == "http-one"


def test_object_given_twice_is_refused(server: Server) -> None:
    twice = {"leyline": {"session": "a"}, "custom_params": {"leyline": {"session": "b"}}}
    answer = post(server, CHAT, **twice)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "at the top level" in message and "custom_params" in message


def test_chat_takes_the_object_in_custom_params_too(server: Server) -> None:
    answer = post(server, CHAT, custom_params={"leyline": {"session": "http-custom"}})
    assert answer.json()["leyline"]["session"] == "http-custom"
    answer = post(server, CHAT, custom_params={"leyline": STRANGER}, stream=True)
    assert answer.status_code == 409


@pytest.mark.parametrize("path", BODIES)
def test_request_without_the_object_is_answered_as_ever(server: Server, path: str) -> None:
    """I1"""
    session = {"session": f"http-ever-{path}"}
    with_object = post(server, path, leyline=session).json()
    without = post(server, path).json()
    assert "leyline" not in without
    assert set(with_object) == {*without, "leyline"}
    assert "cache_read_input_tokens" not in without["usage"]
    assert not without["usage"].get("prompt_tokens_details")


def test_body_in_chunks(server: Server) -> None:
    body = json.dumps({"model": "m", "max_tokens": 2, "leyline": {"session": "c"}, **BODIES[CHAT]})
    pieces = (body[i : i + 5].encode() for i in range(0, len(body), 5))
    headers = {"content-type": "application/json"}
    answer = server.http.post(CHAT, content=pieces, headers=headers)
    assert answer.json()["leyline"]["session"] == "c"


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_ends_the_request(server: Server, stream: bool) -> None:
    """I7: nobody goes on generating for a client that is gone."""
    fields = {"stream": stream, "max_tokens": 3000, "ignore_eos": True}
    body = {"model": "m", **BODIES[CHAT], **fields, "leyline": {"session": f"gone-{stream}"}}
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    where = httpx.URL(server.url)
    with socket.create_connection((where.host, where.port)) as connection:
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        wait_for(lambda: running(server) == 1)
        if stream:
            assert connection.recv(1)
    wait_for(lambda: running(server) == 0)


def running(server: Server) -> int:
    return server.http.get("/v1/loads").json()["loads"][0]["num_running_reqs"]


def wait_for(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_many_at_once_keep_their_own_reports(server: Server) -> None:
    """I1, I8: answers come out of the engine in batches."""
    answers: dict[int, httpx.Response] = {}

    def ask(i: int) -> None:
        extra = {"leyline": {"session": f"many-{i}"}} if i % 2 else {}
        answers[i] = post(server, CHAT, stream=bool(i % 4 < 2), max_tokens=8, **extra)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 12
    for i, answer in answers.items():
        assert answer.status_code == 200
        assert answer.text.count('"leyline"') == i % 2
        assert (f'"session":"many-{i}"' in answer.text) == bool(i % 2)

"""Anthropic's official client against a running server: nothing of it is special to Leyline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from tiny_server import Running, running, tiny_tokenizer, words

from leyline.api.clearable import PLACEHOLDER
from leyline.engine.engine import Config, Engine
from leyline.engine.request import Sampling
from leyline.server.limits import Settings
from leyline.tiny import tiny_model

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SYSTEM = words(1, 40)
BETA = ["context-management-2025-06-27"]
TOOL: dict[str, Any] = {
    "name": "run",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}


def client_of(server: Running, **auth: Any) -> Anthropic:
    """It must not try again: tests want to see the first answer."""
    auth = auth or {"api_key": server.keys[0] if server.keys else "none"}
    return Anthropic(base_url=server.url, max_retries=0, timeout=60, **auth)


@pytest.fixture
def claude(server: Running) -> Anthropic:
    return client_of(server)


def ask(client: Anthropic, messages: list[Any] = HELLO, **more: Any) -> Any:
    """Greedily, unless told otherwise. What this client has no word for goes into `extra_body`."""
    extra = {"temperature": 0, **more.pop("extra_body", {})}
    given = {"model": "tiny", "system": SYSTEM, "max_tokens": 6, "extra_body": extra, **more}
    return client.messages.create(messages=messages, **given)


def prompt_of(answer: Any) -> int:
    usage = answer.usage
    return usage.input_tokens + usage.cache_read_input_tokens


def tokens_of(messages: list[Any]) -> list[int]:
    text = tiny_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return tiny_tokenizer()(text, add_special_tokens=False).input_ids


def test_an_answer_is_what_the_engine_says(server: Running, claude: Anthropic) -> None:
    prompt = tokens_of([{"role": "system", "content": SYSTEM}, *HELLO])
    want = server.engine.generate(prompt, Sampling(max_tokens=6))
    answer = ask(claude, metadata={"user_id": "me"}, extra_body={"top_p": 0.9, "top_k": 5})
    assert answer.type == "message" and answer.role == "assistant" and answer.model == "tiny"
    assert answer.id.startswith("msg_")
    assert [block.text for block in answer.content] == [want.text] != [""]
    assert answer.stop_reason == "max_tokens" and answer.stop_sequence is None
    assert answer.usage.output_tokens == 6
    assert answer.usage.cache_creation_input_tokens == 0
    assert answer.usage.cache_read_input_tokens == len(prompt) - 1  # the engine has it from before
    assert prompt_of(answer) == len(prompt)
    assert "leyline" not in answer.model_extra and "context_management" not in answer.model_extra


def test_a_stream_has_the_apis_events(server: Running, claude: Anthropic) -> None:
    want = ask(claude)
    with claude.messages.stream(
        model="tiny",
        system=SYSTEM,
        messages=HELLO,
        max_tokens=6,
        extra_body={"temperature": 0},
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == want.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 6
    assert prompt_of(final) == prompt_of(want)
    body = {"messages": HELLO, "max_tokens": 3, "temperature": 0, "stream": True}
    with server.http() as http:
        answer = http.post("/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert [name for name, _ in events if name != "content_block_delta"] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(data["type"] == name for name, data in events)
    start, end = events[0][1]["message"], events[-2][1]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["output_tokens"] == 0
    assert end["usage"] == {**start["usage"], "output_tokens": 3}
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def events_of(text: str) -> list[tuple[str, Any]]:
    events = [event.split("\n") for event in text.split("\n\n") if event]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in events
    ]


CALL = {"type": "tool_use", "id": "t1", "name": "run", "input": {"command": "ls", "deep": [1, 2.5]}}
OPENAI_CALL = {
    "id": "t1",
    "type": "function",
    "function": {"name": "run", "arguments": '{"command": "ls", "deep": [1, 2.5]}'},
}
CONVERSATIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"messages": HELLO}, {"messages": HELLO}),
    (
        {
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}},
                        {"type": "text", "text": "d"},
                    ],
                },
            ],
        },
        {
            "messages": [
                {"role": "system", "content": "a\nb"},
                {"role": "user", "content": "c\nd"},
            ]
        },
    ),
    (
        {
            "system": "a",
            "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}],
            "tool_choice": {"type": "auto"},
            "messages": [
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": [{"type": "text", "text": "c"}, CALL]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": [{"type": "text", "text": "x"}],
                            "is_error": True,
                        },
                        {"type": "text", "text": "again"},
                    ],
                },
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
                {"role": "assistant", "content": "done"},
                {"role": "user", "content": "thanks"},
            ],
        },
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "run",
                        "description": TOOL["description"],
                        "parameters": TOOL["input_schema"],
                    },
                }
            ],
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "c", "tool_calls": [OPENAI_CALL]},
                {"role": "tool", "tool_call_id": "t1", "content": "x"},
                {"role": "user", "content": "again"},
                {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL]},
                {"role": "tool", "tool_call_id": "t1", "content": ""},
                {"role": "assistant", "content": "done"},
                {"role": "user", "content": "thanks"},
            ],
        },
    ),
    (
        {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "none"}},
        {"messages": HELLO},
    ),
]


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_the_same_prompt_as_in_openais_shape(
    server: Running, claude: Anthropic, number: int
) -> None:
    """Found in the cache up to the last token, so all tokens are the same; both answer alike."""
    here, there = copied(CONVERSATIONS[number], f"conversation {number}")
    more: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "extra_body": {"temperature": 0}}
    want: Any = server.client().chat.completions.create(**more, **there)
    answer: Any = claude.messages.create(**more, **here)
    n = want.usage.prompt_tokens
    assert want.usage.prompt_tokens_details.cached_tokens < n - 5
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (1, n - 1)
    assert answer.content[0].text == want.choices[0].message.content
    assert claude.messages.count_tokens(model="tiny", **here).input_tokens == n


def copied(pair: tuple[Any, Any], first: str) -> tuple[Any, Any]:
    """The conversations with a beginning of their own, so that no other test's rows are shared."""
    here, there = json.loads(json.dumps(pair))
    system = here.get("system")
    here["system"] = first if system is None else [{"type": "text", "text": first}]
    if isinstance(system, str):
        system = [{"type": "text", "text": system}]
    if system is not None:
        here["system"] += system
        there["messages"][0]["content"] = f"{first}\n{there['messages'][0]['content']}"
    else:
        there["messages"].insert(0, {"role": "system", "content": first})
    return here, there


def test_stop_sequences(claude: Anthropic) -> None:
    more = {"max_tokens": 8, "extra_body": {"temperature": 1, "seed": 5}}
    whole = ask(claude, **more).content[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    answer = ask(claude, **more, stop_sequences=["no such text", stop])
    assert answer.content[0].text == whole[: whole.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    events = list(ask(claude, **more, stop_sequences=[stop], stream=True))
    assert (events[-2].delta.stop_reason, events[-2].delta.stop_sequence) == (
        "stop_sequence",
        stop,
    )


def test_the_end_of_a_turn(server: Running) -> None:
    """A model that ends its answer with what another one says third."""
    prompt = tokens_of([{"role": "system", "content": SYSTEM}, *HELLO])
    tokens = server.engine.generate(prompt, Sampling(6, temperature=1, seed=5)).tokens
    assert tokens[2] not in tokens[:2]
    built = tiny_model("llama", vocab_size=len(tiny_tokenizer()), eos_token_id=tokens[2])
    config = Config(memory_gib=0.01, max_tokens=256)
    with running(Engine(built, tiny_tokenizer(), config, "tiny")) as other:
        answer = ask(client_of(other), max_tokens=50, extra_body={"temperature": 1, "seed": 5})
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == 3


def test_an_answer_of_nothing_has_no_blocks(claude: Anthropic) -> None:
    answer = ask(claude, max_tokens=0)
    assert answer.content == [] and answer.usage.output_tokens == 0
    events = [event.type for event in ask(claude, max_tokens=0, stream=True)]
    assert events == ["message_start", "message_delta", "message_stop"]
    messages = [*HELLO, {"role": "assistant", "content": answer.content}, *HELLO]
    assert ask(claude, messages).usage.output_tokens == 6


def test_max_tokens_is_a_bound() -> None:
    """Clients ask for more than a small model can take; they are told if it was not enough."""
    with running(max_tokens=128) as small:
        claude = client_of(small)
        n = prompt_of(ask(claude))
        answer = ask(claude, max_tokens=20_000, extra_body={"ignore_eos": True})
        assert answer.stop_reason == "model_context_window_exceeded"
        assert answer.usage.output_tokens == 128 - n
        with pytest.raises(anthropic.BadRequestError, match="128"):
            ask(claude, [{"role": "user", "content": "x " * 128}])


def agent_turn(i: int, size: int = 60) -> list[Any]:
    """A tool use and its result."""
    call = {"type": "tool_use", "id": f"t{i}", "name": "run", "input": {"command": f"step {i}"}}
    result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": words(500 + i, size)}
    text = {"type": "text", "text": words(300 + i, 10)}
    return [{"role": "assistant", "content": [text, call]}, {"role": "user", "content": [result]}]


def managed(client: Anthropic, messages: list[Any], leyline: Any = None, **more: Any) -> Any:
    """With a rule that clears all but the newest three results once six are left."""
    rule: Any = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 5},
    }
    return client.beta.messages.create(
        model="tiny",
        max_tokens=4,
        system=SYSTEM,
        tools=[TOOL],
        messages=messages,
        betas=BETA,
        context_management={"edits": [rule]},
        extra_body={"temperature": 0, "leyline": leyline},
        **more,
    )


def size(text: str) -> int:
    return len(tiny_tokenizer()(text, add_special_tokens=False).input_ids)


CLEARED = [0, 0, 0, 0, 0, 3, 3, 3, 6, 6]
"""Results gone with each turn."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("session", ["agent", None])
def test_clearing_does_not_cost_the_cached_prefix(
    claude: Anthropic, session: str | None, stream: bool
) -> None:
    """With a session all is read from the cache but placeholders and what is new; without one, all
    behind the first placeholder is computed again."""
    leyline = {"session": f"{session} {stream}"} if session else None
    messages: list[Any] = [{"role": "user", "content": f"{session} {stream} {words(7, 20)}"}]
    placeholder = size(PLACEHOLDER)
    before = whole = 0
    for i, cleared in enumerate(CLEARED):
        messages += agent_turn(i)
        usage, applied, report = last(managed(claude, messages, leyline, stream=stream))
        whole, before = counted(claude, messages), whole
        new = whole - before + size("\nassistant") + 10  # the turn that was opened to answer
        computed = usage.input_tokens
        gone = sum(size(words(500 + k, 60)) - placeholder for k in range(cleared))
        assert computed + usage.cache_read_input_tokens == whole - gone
        assert sum(edit.cleared_tool_uses for edit in applied) == cleared
        assert sum(edit.cleared_input_tokens for edit in applied) == gone
        clears_now = i > 0 and cleared > CLEARED[i - 1]
        if session:
            assert computed <= new + 3 * placeholder * clears_now
            assert report["tokens"]["computed"] == computed and report["fallback"] is None
            assert (report["tokens"]["moved"] > 0) is clears_now
        elif clears_now:
            kept = sum(size(words(500 + k, 60)) for k in (i - 2, i - 1))
            assert computed > whole - before + 3 * placeholder + kept


def counted(client: Anthropic, messages: list[Any]) -> int:
    """Tokens of the prompt with nothing cleared."""
    more: dict[str, Any] = {"system": SYSTEM, "tools": [TOOL]}
    return client.messages.count_tokens(model="tiny", messages=messages, **more).input_tokens


def last(answer: Any) -> tuple[Any, list[Any], Any]:
    """Usage, applied edits and report of an answer, streamed or not."""
    if not isinstance(answer, anthropic.types.beta.BetaMessage):
        answer = list(answer)[-2]
        assert answer.type == "message_delta"
    report = (answer.model_extra or {}).get("leyline")
    return answer.usage, answer.context_management.applied_edits, report


def test_what_is_prompted_with_is_the_edited_conversation(
    server: Running, claude: Anthropic
) -> None:
    """The same tokens as those of a client that has edited its messages itself."""
    messages: list[Any] = [{"role": "user", "content": words(20, 20)}]
    for i in range(6):
        messages += agent_turn(i)
    edited = json.loads(json.dumps(messages))
    for message in edited[2:7:2]:
        message["content"][0]["content"] = PLACEHOLDER
    plain = ask(claude, edited, max_tokens=4, tools=[TOOL])
    answer = managed(claude, messages)
    assert answer.usage.input_tokens == 1 and prompt_of(answer) == prompt_of(plain)
    assert answer.content[0].text == plain.content[0].text
    count = claude.beta.messages.count_tokens(
        model="tiny",
        messages=messages,
        betas=BETA,
        context_management={
            "edits": [
                {
                    "type": "clear_tool_uses_20250919",
                    "trigger": {"type": "tool_uses", "value": 5},
                }
            ]
        },
        system=SYSTEM,
        tools=[TOOL],
    )
    assert count.input_tokens == prompt_of(plain)
    assert count.context_management is not None
    assert count.context_management.original_input_tokens == counted(claude, messages)


def test_the_trigger_counts_what_the_prompt_has(claude: Anthropic) -> None:
    """To a few in a hundred, system prompt, tools and the template's own tokens included."""
    messages: list[Any] = [{"role": "user", "content": words(20, 20)}]
    for i in range(6):
        messages += agent_turn(i, 250)
    n = counted(claude, messages)
    for value, clears in ((int(n * 0.95), True), (int(n * 1.05), False)):
        edit: Any = {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "input_tokens", "value": value},
        }
        count = claude.beta.messages.count_tokens(
            model="tiny",
            system=SYSTEM,
            tools=[TOOL],
            messages=messages,
            betas=BETA,
            context_management={"edits": [edit]},
        )
        assert (count.input_tokens < n) is clears


def test_no_edit_is_told_as_none(claude: Anthropic) -> None:
    answer = claude.beta.messages.create(
        model="tiny",
        max_tokens=1,
        messages=HELLO,
        betas=BETA,
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
    )
    assert answer.context_management is not None and answer.context_management.applied_edits == []


def test_the_leyline_object(server: Running, claude: Anthropic) -> None:
    """As on the OpenAI API's routes: derived edits, directives, policies, errors."""
    messages: list[Any] = [{"role": "user", "content": words(40, 20)}, *agent_turn(1, 80)]
    messages[-1]["content"].append({"type": "text", "text": words(41, 40)})
    extra: dict[str, Any] = {"leyline": {"session": "object"}}
    first = ask(claude, messages, extra_body=extra)
    assert first.leyline["tokens"]["prompt"] == prompt_of(first)
    policy = {"name": "clear_tool_outputs", "keep": 0, "placeholder": "gone"}
    extra["leyline"]["policy"] = policy
    second = ask(claude, [*messages, *agent_turn(2, 5)], extra_body=extra)
    (edit,) = second.leyline["edits"]
    assert edit["mode"] == "amortize" and edit["shift"] < -60
    assert second.usage.cache_read_input_tokens == (
        second.leyline["tokens"]["shared"] + second.leyline["tokens"]["moved"]
    )
    for leyline, field in (
        ({"session": ""}, "leyline.session"),
        ({"session": "a", "policy": {"name": "no"}}, "leyline.policy.name"),
        ({"session": "a", "directives": [{"start": 5, "end": 5}]}, "leyline.directives[0]"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=f"{field}: ".replace("[", r"\[")):
            ask(claude, messages, extra_body={"leyline": leyline})
    strict = {"session": "never", "strict": True, "directives": [{"start": 0, "end": 2}]}
    for stream in (False, True):
        with pytest.raises(anthropic.ConflictError, match="source_missing") as caught:
            ask(claude, messages, extra_body={"leyline": strict}, stream=stream)
        assert caught.value.response.headers["x-should-retry"] == "false"
    server.settled()


def test_an_answer_that_is_ended_is_an_error(server: Running, claude: Anthropic) -> None:
    """Too late for a status: the stream's last event is an error, which the client raises."""
    more = {"session": "ended"}
    stream = ask(
        claude, max_tokens=4000, stream=True, extra_body={"leyline": more, "ignore_eos": True}
    )
    seen = [next(stream)]
    with server.http() as http:
        assert http.delete("/v1/leyline/sessions/ended").status_code == 200
    with pytest.raises(anthropic.APIStatusError, match="ended before"):
        seen += stream
    assert seen[0].type == "message_start" and seen[-1].type != "message_stop"
    server.settled()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}


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

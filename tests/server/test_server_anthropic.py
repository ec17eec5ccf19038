"""Anthropic's official client against a running server: nothing of it is special to Leyline."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from tiny_claude import CALL, HELLO, SYSTEM, TOOL, ask, client_of, prompt_of
from tiny_server import Running, running, tiny_tokenizer

from leyline.engine.engine import Config, Engine
from leyline.engine.request import Sampling
from leyline.tiny import tiny_model


@pytest.fixture
def claude(server: Running) -> Anthropic:
    return client_of(server)


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

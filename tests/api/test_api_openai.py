"""OpenAI's shapes: checked requests, messages for chat templates, answers."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_api_leyline_object import JSON

from leyline.api.errors import FieldError
from leyline.api.messages import check_messages, for_template
from leyline.api.openai import UNSUPPORTED, parse_chat, parse_completion
from leyline.api.openai_answers import ChatChunk, ChatChunkChoice, ChatDelta, TextAnswer, Usage
from leyline.api.sessions import parse_edit
from leyline.directive import DirectiveError

HI = [{"role": "user", "content": "hi"}]
FIELDS = [
    *UNSUPPORTED,
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "tools",
    "chat_template_kwargs",
    "leyline",
]
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON | st.integers(0, 5))


@given(BODIES, JSON)
def test_whatever_comes_is_taken_or_named(body: dict[str, Any], prompt: Any) -> None:
    """I6: nothing a stranger sends is a crash."""
    before = copy.deepcopy(body)
    for parse, more in (
        (parse_chat, {"messages": HI}),
        (parse_chat, {"messages": prompt}),
        (parse_completion, {"prompt": "hi"}),
        (parse_completion, {"prompt": prompt}),
        (parse_edit, {"prompt": prompt}),
        (parse_edit, {"messages": prompt, "policy": {}}),
    ):
        try:
            parse({**body, **more})
        except FieldError as error:
            assert error.field and error.message.endswith(".")
            assert len(error.message) < 600
    assert repr(body) == repr(before)


@given(JSON)
def test_bodies_that_are_no_objects(body: Any) -> None:
    if not isinstance(body, dict):
        for parse in (parse_chat, parse_completion, parse_edit):
            with pytest.raises(FieldError, match="must be an object"):
                parse(body)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields(name: str) -> None:
    """What would change the answer is refused; values that change nothing are fine."""
    for neutral in (None, *UNSUPPORTED[name]):
        assert parse_completion({"prompt": "a", name: neutral})
    with pytest.raises(FieldError, match="is not supported") as caught:
        parse_completion({"prompt": "a", name: "surely not"})
    assert caught.value.field == name
    assert caught.value.code == "unsupported_parameter"


def test_limits() -> None:
    assert parse_chat({"messages": HI}).limit is None
    assert parse_chat({"messages": HI, "max_tokens": 0}).limit == 0
    assert parse_chat({"messages": HI, "max_completion_tokens": 5}).limit == 5
    assert parse_completion({"prompt": "a"}).limit == 16
    assert parse_completion({"prompt": "a", "max_tokens": None}).limit == 16
    assert parse_completion({"prompt": "a", "max_tokens": 0}).limit == 0


def test_logprobs() -> None:
    assert parse_chat({"messages": HI}).alternatives is None
    assert parse_chat({"messages": HI, "logprobs": False}).alternatives is None
    assert parse_chat({"messages": HI, "logprobs": True}).alternatives == 0
    assert parse_chat({"messages": HI, "logprobs": True, "top_logprobs": 4}).alternatives == 4
    assert parse_completion({"prompt": "a", "logprobs": 0}).alternatives == 0


def test_tools_and_template() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = parse_chat({"messages": HI, "tools": tools, "reasoning_effort": "low"})
    assert request.offered_tools == tools
    assert request.template_kwargs == {"reasoning_effort": "low"}
    assert parse_chat({"messages": HI, "tools": []}).offered_tools is None
    none = parse_chat({"messages": HI, "tools": tools, "tool_choice": "none"})
    assert none.offered_tools is None


def test_for_template() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    odd = [{"function": {"name": "f", "arguments": given}} for given in ("{", "[1]", {"a": 1}, "")]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, *odd], "reasoning": "r"},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    before = copy.deepcopy(messages)
    out = for_template(check_messages(messages))
    assert messages == before
    assert [message["content"] for message in out] == ["a\nb", "", "", "no"]
    arguments = [each["function"]["arguments"] for each in out[1]["tool_calls"]]
    assert arguments == [{"a": [1]}, "{", "[1]", {"a": 1}, {}]
    assert out[1]["reasoning"] == "r" and out[2]["tool_call_id"] == "1"


def test_directive_errors_are_field_errors() -> None:
    """Callers have to know one kind only."""
    for parse, body in (
        (parse_completion, {"prompt": [1, "a"]}),
        (parse_edit, {"directives": [[1, 2, [], "x"]]}),
    ):
        with pytest.raises(FieldError) as caught:
            parse(body)
        assert not isinstance(caught.value, DirectiveError)


def test_answers_on_the_wire() -> None:
    """null where the API has it, nothing where it has nothing."""
    chunk = ChatChunk(
        id="x", created=1, model="m", choices=[ChatChunkChoice(delta=ChatDelta(content="a"))]
    )
    assert json.loads(chunk.model_dump_json()) == {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}
        ],
    }
    usage = Usage.of(10, 5, 7)
    text = TextAnswer(id="x", created=1, model="m", choices=[], usage=usage).model_dump()
    assert text["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    assert "leyline" not in text

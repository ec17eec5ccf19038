"""Anthropic's requests: checked, and as chat messages."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from test_api_leyline_object import JSON

from leyline.api.anthropic import UNSUPPORTED, parse_count, parse_messages
from leyline.api.anthropic_messages import check_conversation, to_chat
from leyline.api.errors import FieldError

HI = [{"role": "user", "content": "hi"}]
FIELDS = [
    *UNSUPPORTED,
    "model",
    "max_tokens",
    "temperature",
    "top_k",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "stop_sequences",
    "stream",
    "metadata",
    "context_management",
    "chat_template_kwargs",
    "leyline",
]
BLOCK_FIELDS = ["type", "text", "thinking", "id", "name", "input", "tool_use_id", "content"]
KINDS = st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"])
BLOCKS = st.dictionaries(st.sampled_from(BLOCK_FIELDS), KINDS | JSON)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
            "content": st.lists(BLOCKS) | JSON,
        }
    )
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON | st.integers(0, 5)), MESSAGES | JSON)
def test_whatever_comes_is_taken_or_named(body: dict[str, Any], messages: Any) -> None:
    """I6: nothing a stranger sends is a crash."""
    before = copy.deepcopy((body, messages))
    for parse in (parse_messages, parse_count):
        for given_messages in (HI, messages):
            try:
                request = parse({**body, "messages": given_messages})
                request.chat(request.messages)
            except FieldError as error:
                assert error.field and error.message.endswith(".")
                assert len(error.message) < 600
    assert repr((body, messages)) == repr(before)


def test_messages_as_chat_messages() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "ü", "n": 2}}
    messages = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "wait"},
                call,
                {**call, "id": "t2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "system", "content": "be quick"},
    ]
    function = {"name": "look", "arguments": '{"at": "ü", "n": 2}'}
    one, two = ({"type": "text", "text": text} for text in ("one", "two"))
    assert to_chat("you", check_conversation(messages)) == [
        {"role": "system", "content": "you"},
        {"role": "user", "content": [one, two]},
        {
            "role": "assistant",
            "content": "wait",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": function},
                {"id": "t2", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "t2", "content": "no", "is_error": True},
        {
            "role": "tool",
            "tool_call_id": "t1",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "go on"},
        {"role": "system", "content": "be quick"},
    ]


def said(role: str, *blocks: Any) -> st.SearchStrategy[dict[str, Any]]:
    lists = st.lists(st.sampled_from(blocks), min_size=1, max_size=3)
    return lists.map(lambda content: {"role": role, "content": content})


TEXT = {"type": "text", "text": "x"}
USE_A, USE_B = ({"type": "tool_use", "id": i, "name": "look", "input": {}} for i in "ab")
RESULT_A, RESULT_B = ({"type": "tool_result", "tool_use_id": i, "content": "y"} for i in "ab")
TURNS = st.one_of(
    said("assistant", TEXT, USE_A, USE_B),
    said("user", TEXT, RESULT_A, RESULT_B),
    said("system", TEXT),
)


def assert_results_behind_calls(chat: list[dict[str, Any]]) -> None:
    """Each call has one result, and nothing stands between them."""
    waiting: list[str] = []
    for message in chat:
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
            continue
        assert not waiting
        waiting = [call["id"] for call in message.get("tool_calls", ())]
        assert len(set(waiting)) == len(waiting)
    assert not waiting


@settings(max_examples=500, deadline=None)
@given(st.lists(TURNS, min_size=1, max_size=5))
def test_results_stand_right_behind_their_calls(messages: list[dict[str, Any]]) -> None:
    try:
        checked = check_conversation(messages)
    except FieldError:
        return
    assert_results_behind_calls(to_chat(None, checked))


def test_what_may_stand_around_results() -> None:
    """Results in any order and in several messages; ids again in a later step; words behind."""
    messages = [
        {"role": "assistant", "content": [TEXT, USE_A, USE_B]},
        {"role": "user", "content": [RESULT_B]},
        {"role": "user", "content": [RESULT_A, TEXT]},
        {"role": "system", "content": "be quick"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": [USE_A]},
        {"role": "assistant", "content": [USE_B]},
        {"role": "user", "content": [RESULT_A, RESULT_B]},
        {"role": "system", "content": [TEXT]},
    ]
    assert check_conversation(messages) is messages
    assert_results_behind_calls(to_chat("you", messages))


def test_thinking_is_told_to_the_template() -> None:
    body = {"messages": HI, "max_tokens": 1}
    assert parse_messages(body).template_kwargs == {}
    for kind, think in (("enabled", True), ("adaptive", True), ("disabled", False)):
        asked = {**body, "thinking": {"type": kind, "budget_tokens": 1024}}
        assert parse_messages(asked).template_kwargs == {"enable_thinking": think}
    asked["chat_template_kwargs"] = {"enable_thinking": True}
    assert parse_messages(asked).template_kwargs == {"enable_thinking": True}

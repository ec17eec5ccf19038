"""Policies: pure functions from messages to edited messages (design §3)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.policy import PLACEHOLDER, PolicyError, apply_policy, clear_tool_outputs

TEXT = st.text(max_size=12)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=3)
CALL = st.fixed_dictionaries(
    {"id": TEXT, "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})}
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXT | PARTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXT | st.none()},
        optional={"tool_calls": st.lists(CALL, max_size=2)},
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": TEXT | PARTS},
        # Ids repeat in real harnesses: only the position counts.
        optional={"tool_call_id": st.sampled_from(["a", "b"]), "name": TEXT},
    ),
)
MESSAGES = st.lists(MESSAGE, max_size=12)
KEEP = st.integers(0, 6)
Messages = list[dict[str, Any]]


def tool_positions(messages: Messages) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "tool"]


@given(MESSAGES, KEEP, TEXT)
def test_only_old_tool_outputs_change(messages: Messages, keep: int, placeholder: str) -> None:
    edited = clear_tool_outputs(messages, keep=keep, placeholder=placeholder)
    assert len(edited) == len(messages)
    tools = tool_positions(messages)
    for i, (before, after) in enumerate(zip(messages, edited, strict=True)):
        newer = sum(j > i for j in tools)
        if i in tools and newer >= keep:
            assert after == {**before, "content": placeholder}
        else:
            assert after == before


@given(MESSAGES, KEEP)
def test_idempotent(messages: Messages, keep: int) -> None:
    once = clear_tool_outputs(messages, keep=keep)
    assert clear_tool_outputs(once, keep=keep) == once


@given(MESSAGES, KEEP)
def test_clearing_step_by_step_equals_clearing_once(messages: Messages, keep: int) -> None:
    """A client may send edited or full history: the prompt is the same (edits are monotone)."""
    grown: Messages = []
    for message in messages:
        grown = clear_tool_outputs([*grown, message], keep=keep)
    assert grown == clear_tool_outputs(messages, keep=keep)


@given(MESSAGES, KEEP)
def test_input_is_not_changed(messages: Messages, keep: int) -> None:
    before = copy.deepcopy(messages)
    edited = clear_tool_outputs(messages, keep=keep)
    assert messages == before
    edited.append({"role": "user", "content": "new"})
    assert messages == before


@given(MESSAGES, KEEP)
def test_by_name_is_the_same(messages: Messages, keep: int) -> None:
    spec = {"name": "clear_tool_outputs", "keep": keep, "placeholder": "gone"}
    want = clear_tool_outputs(messages, keep=keep, placeholder="gone")
    assert apply_policy(spec, messages) == want


def test_defaults() -> None:
    messages = [{"role": "tool", "content": str(i)} for i in range(4)]
    edited = apply_policy({"name": "clear_tool_outputs"}, messages)
    assert [m["content"] for m in edited] == [PLACEHOLDER, PLACEHOLDER, "2", "3"]
    assert PLACEHOLDER == "[evicted: old tool output]"


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        (None, "policy", "must be an object, not None"),
        ([], "policy", "must be an object"),
        ({}, "policy.name", "clear_tool_outputs"),
        ({"name": "forget_all"}, "policy.name", "'forget_all'"),
        ({"name": ["clear_tool_outputs"]}, "policy.name", "must be one of"),
        ({"name": "clear_tool_outputs", "kep": 2}, "policy.kep", "keep, placeholder"),
        ({"name": "clear_tool_outputs", "messages": []}, "policy.messages", "is not an option"),
        ({"name": "clear_tool_outputs", 3: 2}, "policy.3", "is not an option"),
        ({"name": "clear_tool_outputs", "keep": -1}, "policy.keep", "not -1"),
        ({"name": "clear_tool_outputs", "keep": True}, "policy.keep", "not True"),
        ({"name": "clear_tool_outputs", "keep": 2.0}, "policy.keep", "not 2.0"),
        ({"name": "clear_tool_outputs", "keep": "2"}, "policy.keep", "not '2'"),
        ({"name": "clear_tool_outputs", "keep": None}, "policy.keep", "not None"),
        ({"name": "clear_tool_outputs", "keep": -(10**5000)}, "policy.keep", "too long to show"),
        ({"name": "clear_tool_outputs", "placeholder": 7}, "policy.placeholder", "not 7"),
        ({"name": "x" * 10_000}, "policy.name", "…"),
        ({"name": "clear_tool_outputs", "y" * 10_000: 1}, "policy." + "y" * 60, "not an option"),
    ],
)
def test_malformed_policies_get_a_sentence(spec: Any, field: str, says: str) -> None:
    """I6: a malformed request is one clear sentence naming the field, and nothing changed."""
    messages = [{"role": "tool", "content": str(i)} for i in range(4)]
    before = copy.deepcopy(messages)
    with pytest.raises(PolicyError) as caught:
        apply_policy(spec, messages)
    assert caught.value.field == field
    assert says in caught.value.message
    assert caught.value.message.endswith(".") and len(str(caught.value)) < 300
    assert messages == before


def test_messages_that_are_no_objects() -> None:
    with pytest.raises(PolicyError) as caught:
        apply_policy({"name": "clear_tool_outputs"}, [{"role": "user"}, "hello"])  # type: ignore[list-item]
    assert caught.value.field == "messages[1]"

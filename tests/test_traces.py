"""The shipped agent sessions, and what a malformed trace file gets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from leyline.policy import PLACEHOLDER, clear_tool_outputs
from leyline.traces import Session, TraceError, calls, gaps_of, load_traces

GOOD = {"session": "s", "messages": [{"role": "user", "content": "a\u2028b"}], "gaps_ms": []}


def test_shipped_sessions() -> None:
    sessions = load_traces()
    assert len(sessions) == len({session.id for session in sessions}) == 12
    assert sum(len(list(calls(session))) for session in sessions) == 241
    for session in sessions:
        roles = [message["role"] for message in session.messages]
        assert roles == ["user", *["assistant", "tool"] * (len(roles) // 2 - 1), "assistant"]
        assert len(session.gaps_ms) == len(list(calls(session))) - 1


def test_calls_replay_the_session() -> None:
    """Each call holds everything before its answer, and the answer comes next."""
    session = load_traces()[0]
    for call in calls(session):
        n = len(call.messages)
        assert call.messages == list(session.messages[:n])
        assert session.messages[n] == {"role": "assistant", "content": call.answer}


def test_a_greeting_is_no_call() -> None:
    """Nobody asked for it: it is context of the calls behind it, and gaps stay with theirs."""
    plain = load_traces()[0]
    greeting = {"role": "assistant", "content": "How can I help?"}
    greeted = Session("greeted", (greeting, *plain.messages), (7.5, *plain.gaps_ms))
    found = list(calls(greeted))
    assert [call.answer for call in found] == [call.answer for call in calls(plain)]
    assert [call.messages for call in found] == [[greeting, *c.messages] for c in calls(plain)]
    assert gaps_of(greeted) == gaps_of(plain) == plain.gaps_ms
    assert len(gaps_of(greeted)) == len(found) - 1
    for messages in ((), (greeting,)):
        alone = Session("alone", messages, ())
        assert not list(calls(alone)) and gaps_of(alone) == ()


def test_policy_on_a_real_session() -> None:
    session = load_traces()[1]
    last = list(calls(session))[-1]
    outputs = [m["content"] for m in clear_tool_outputs(last.messages) if m["role"] == "tool"]
    recorded = [m["content"] for m in last.messages if m["role"] == "tool"]
    assert set(outputs[:-2]) == {PLACEHOLDER}
    assert outputs[-2:] == recorded[-2:]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_own_file(tmp_path: Path, pack: type[bytes]) -> None:
    file = tmp_path / "own"
    line = json.dumps(GOOD, ensure_ascii=False)
    file.write_bytes(pack(f"{line}\r\n\n{line}\n".encode()))
    sessions = load_traces(file)
    assert [session.id for session in sessions] == ["s", "s"]
    assert sessions[0].messages[0]["content"] == "a\u2028b"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "line 1: not JSON"),
        (b"[]", "line 1: must be an object"),
        (b"\n" + json.dumps({**GOOD, "session": 3}).encode(), "line 2: must be an object"),
        (json.dumps({**GOOD, "messages": "hi"}).encode(), '"messages" must be a list'),
        (json.dumps({**GOOD, "messages": [{"role": "user"}]}).encode(), '"messages" must be'),
        (json.dumps({**GOOD, "gaps_ms": ["1"]}).encode(), '"gaps_ms" must be a list'),
        (b"\xff\xfe", "neither UTF-8"),
        (gzip.compress(b"{}" * 999, mtime=0)[:-9], "whole gzip data"),
        (b"\x1f\x8b\x08garbage", "whole gzip data"),
    ],
)
def test_malformed_files_get_a_sentence(tmp_path: Path, data: bytes, says: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        load_traces(file)
    assert says in str(caught.value) and str(file) in str(caught.value)

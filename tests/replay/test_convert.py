"""Logs of the OpenAI API into traces, and back from their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_server import tiny_tokenizer
from typer.testing import CliRunner

from leyline import cli
from leyline.replay.arms import ARMS, jobs_of
from leyline.replay.ceiling import ceiling
from leyline.replay.convert import convert
from leyline.traces import TraceError, calls, load_traces, save_traces, take

TASK = {"role": "user", "content": "Fix it."}
ACT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "é"}'}}
    ],
}
SAW = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a.py"}]}
DONE = {"role": "assistant", "content": "Done."}
ACT_TEXT = '<tool_call>\n{"name": "ls", "arguments": {"path": "é"}}\n</tool_call>'
PLAIN = (
    TASK,
    {"role": "assistant", "content": ACT_TEXT},
    {"role": "tool", "content": "a.py"},
    DONE,
)


def log(tmp_path: Path, *rows: Any) -> Path:
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return file


def answered(message: dict[str, Any]) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "message": message}]}


FIRST = {"model": "m", "messages": [TASK]}
SECOND = {"model": "m", "messages": [TASK, ACT, SAW]}


@pytest.mark.parametrize(
    "rows",
    [
        [{**FIRST, **answered(ACT)}, {**SECOND, **answered(DONE)}],
        [
            {"request": FIRST, "response": answered(ACT)},
            {"request": SECOND, "response": answered(DONE)},
        ],
        [
            {"body": FIRST, "response": {"status_code": 200, "body": answered(ACT)}},
            {"body": SECOND, "response": {"status_code": 200, "body": answered(DONE)}},
        ],
        [{"messages": [TASK, ACT, SAW, DONE]}],
        [FIRST, SECOND, {"messages": [TASK, ACT, SAW, DONE]}],
        [{**SECOND, **answered(DONE)}, {**FIRST, **answered(ACT)}],  # a later line says less
    ],
    ids=["joined", "apart", "batch", "transcript", "requests", "backwards"],
)
def test_lines_of_one_conversation_are_one_session(tmp_path: Path, rows: list[Any]) -> None:
    (session,) = convert(log(tmp_path, *rows))
    assert session.messages == PLAIN and session.id == "log-1"
    assert [call.answer for call in calls(session)] == [ACT_TEXT, "Done."]


def test_conversations_are_told_apart(tmp_path: Path) -> None:
    """Also those that begin alike, each grown by the line that goes on from it."""
    other = {"role": "user", "content": "Another."}
    first, second = convert(
        log(
            tmp_path,
            {"messages": [TASK, ACT]},
            {"messages": [TASK, DONE]},
            {"messages": [TASK, DONE, other], **answered(ACT)},
        )
    )
    assert [m["content"] for m in first.messages] == ["Fix it.", ACT_TEXT]
    assert [m["content"] for m in second.messages] == ["Fix it.", "Done.", "Another.", ACT_TEXT]


def test_a_greeting_is_no_answer(tmp_path: Path) -> None:
    """Logs of chats often begin with one."""
    hello = {"role": "assistant", "content": "How can I help?"}
    request = {"messages": [hello, TASK]}
    (session,) = convert(
        log(tmp_path, {"messages": [hello]}, request, {**request, **answered(DONE)})
    )
    assert session.messages == (hello, TASK, DONE)
    (job,) = jobs_of([session])
    assert job.calls == (([hello, TASK], "Done."),)
    for arm in ARMS:
        ((prompt, cached),) = ceiling(tiny_tokenizer(), [job], arm, keep=2).values()
        assert prompt > 0 and cached == 0
    with pytest.raises(TraceError, match="no model's answer"):
        convert(log(tmp_path, request))


def test_roles_by_other_names(tmp_path: Path) -> None:
    rows = [{"role": "developer", "content": "Be brief."}, TASK, DONE]
    (session,) = convert(log(tmp_path, {"messages": rows}))
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([], "line 2: must be an object"),
        ({}, "line 2: messages: must be a list"),
        ({"messages": [{"role": "user"}]}, r"line 2: messages\[0\].content: is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is"),
        ({"messages": [TASK], "choices": []}, "line 2: choices must hold"),
        ({"messages": [TASK], "choices": [{"message": 3}]}, "line 2: choices must hold"),
        ({"request": 3}, "line 2: the request must be an object"),
    ],
)
def test_bad_lines_are_refused_with_their_number(tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        convert(log(tmp_path, {"messages": [TASK, DONE]}, row))


def test_no_json_and_no_answer(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('\n{"messages"', encoding="utf-8")
    with pytest.raises(TraceError, match="line 2: not JSON"):
        convert(file)
    with pytest.raises(TraceError, match="no model's answer"):
        convert(log(tmp_path, FIRST))


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_command_writes_what_replay_reads(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    source = log(tmp_path, {"messages": [TASK, ACT, SAW, DONE]})
    done = CliRunner().invoke(cli.app, ["traces", "convert", str(source), str(out)])
    assert done.exit_code == 0, done.output
    (session,) = load_traces(out)
    assert session.messages == PLAIN and session.gaps_ms == ()


def test_command_says_what_is_wrong(tmp_path: Path) -> None:
    source = log(tmp_path, FIRST)
    done = CliRunner().invoke(cli.app, ["traces", "convert", str(source), str(tmp_path / "o")])
    assert done.exit_code == 1 and "no model's answer" in done.stderr
    assert not (tmp_path / "o").exists()


def test_shipped_sessions_round_trip(tmp_path: Path) -> None:
    shipped = load_traces()[:3]
    save_traces(tmp_path / "t.jsonl", shipped)
    assert load_traces(tmp_path / "t.jsonl") == shipped


def test_copies_follow_where_there_are_too_few() -> None:
    shipped = load_traces()[:3]
    assert take(shipped, 2) == shipped[:2] and take(shipped) == shipped
    taken = take(shipped, 7)
    assert len({session.id for session in taken}) == 7
    first = [session.messages[0]["content"] for session in taken]
    assert first[:3] == [session.messages[0]["content"] for session in shipped]
    assert first[3] == f"(copy 1) {first[0]}" and first[6] == f"(copy 2) {first[0]}"
    assert all(a.messages[1:] == b.messages[1:] for a, b in zip(taken[3:6], shipped, strict=True))

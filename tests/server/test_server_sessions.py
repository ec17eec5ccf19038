"""/v1/leyline/sessions, and whose they are (I8)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tiny_server import Running, running, tiny_tokenizer, words

from leyline.server.limits import Settings

PROMPT = tiny_tokenizer()(words(7, 60), add_special_tokens=False).input_ids


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as it:
        yield it


def begin(http: httpx.Client, session: str, prompt: list[int] = PROMPT) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 0, "leyline": {"session": session}}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def path(session: str, rest: str = "") -> str:
    """Dots too: clients take `..` for the folder above."""
    return f"/v1/leyline/sessions/{quote(session, safe='').replace('.', '%2E')}{rest}"


def test_a_session_shows_its_segments(http: httpx.Client) -> None:
    begin(http, "shown")
    view = http.get(path("shown")).json()
    n = len(PROMPT)
    assert view["tokens"] == view["cached"] == view["exact"] == n
    assert view["segments"] == [{"start": 0, "tokens": n, "exact": True, "rotations": 0}]
    report = http.post(path("shown", "/directives"), json={"directives": [[5, 30, [], "amortize"]]})
    assert report.json()["tokens"] == {
        "prompt": n - 25,
        "shared": 5,
        "moved": n - 31,
        "computed": 1,
    }
    view = http.get(path("shown")).json()
    assert view["tokens"] == view["cached"] == n - 25
    assert view["exact"] == 5
    assert view["edits"] == view["max_rotations"] == 1
    assert sum(segment["tokens"] for segment in view["segments"]) == n - 25
    assert [segment["exact"] for segment in view["segments"]] == [True, False, False]


def test_the_next_request_finds_the_edits_done(http: httpx.Client) -> None:
    begin(http, "ahead")
    report = http.post(path("ahead", "/directives"), json={"directives": [{"start": 5, "end": 30}]})
    assert report.json()["session"] == "ahead"
    answer = begin(http, "ahead", [*PROMPT[:5], *PROMPT[30:], 9, 9])
    assert answer["leyline"]["edits"] == []
    assert answer["leyline"]["tokens"]["computed"] == 2


def test_edits_by_messages(http: httpx.Client) -> None:
    messages = [
        {"role": "user", "content": words(1, 30)},
        {"role": "tool", "content": words(2, 60)},
        {"role": "user", "content": words(3, 30)},
    ]
    leyline = {"session": "messages"}
    body = {"messages": messages, "max_tokens": 1, "leyline": leyline}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    policy = {"name": "clear_tool_outputs", "keep": 0}
    edit = {"messages": messages, "policy": policy}
    report = http.post(path("messages", "/directives"), json=edit).json()
    assert report["tokens"]["moved"] > 30 and report["tokens"]["shared"] > 30
    body["leyline"] = {**leyline, "policy": policy}
    tokens = http.post("/v1/chat/completions", json=body).json()["leyline"]["tokens"]
    # Only the assistant's turn, which the edit did not open, is new.
    assert tokens["computed"] < 16 and tokens["moved"] == 0


def test_edits_by_prompt(http: httpx.Client) -> None:
    begin(http, "prompt")
    edit = {"prompt": PROMPT[:8] + PROMPT[40:], "mode": "repair", "repair": 3}
    report = http.post(path("prompt", "/directives"), json=edit).json()
    assert report["edits"][0]["mode"] == "repair"
    assert report["tokens"]["computed"] == 4


def test_forgetting_now(server: Running, http: httpx.Client) -> None:
    """I5: nothing of what was behind the span is left."""
    begin(http, "secret")
    edit = {"directives": [{"start": 5, "end": 30, "mode": "forget"}], "scrub": True}
    report = http.post(path("secret", "/directives"), json=edit).json()
    assert report["tokens"]["moved"] == 0
    view = http.get(path("secret")).json()
    assert view["exact"] == view["tokens"] == len(PROMPT) - 25


@pytest.mark.parametrize("scrub", [False, True])
def test_drop(server: Running, http: httpx.Client, scrub: bool) -> None:
    private = [*PROMPT[::-1], 7 + scrub]  # nobody else has these rows
    begin(http, "dropped", private)
    before = server.settled()
    answer = http.delete(path("dropped"), params={"scrub": scrub})
    assert answer.json() == {
        "session": "dropped",
        "dropped": True,
        "freed": answer.json()["freed"],
        "kept_by_others": answer.json()["kept_by_others"],
        "scrubbed": scrub,
    }
    after = server.settled()
    assert answer.json()["freed"] > 0
    assert after.free == before.free + answer.json()["freed"]
    assert after.sessions == before.sessions - 1
    for request in (http.get, http.delete):
        again = request(path("dropped"))
        assert again.status_code == 404
        assert again.json()["error"]["code"] == "session_not_found"


def test_drop_wants_a_yes_or_no(http: httpx.Client) -> None:
    begin(http, "kept")
    answer = http.delete(path("kept"), params={"scrub": "maybe"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "scrub"
    assert http.get(path("kept")).status_code == 200


@pytest.mark.parametrize(
    "session",
    [
        "run-42",
        "a/b",
        "/",
        "../../etc/passwd",
        "..",
        "a/directives",
        "directives",
        "a b?c#d&e=f",
        "100%",
        "%2F",
        "日本 🚀",
        "x" * 256,
    ],
)
def test_names_are_data(http: httpx.Client, session: str) -> None:
    begin(http, session)
    assert http.get(path(session)).json()["session"] == session
    edit = {"directives": [{"start": 5, "end": 30}]}
    report = http.post(path(session, "/directives"), json=edit)
    assert report.json()["session"] == session
    assert http.get(path(session)).json()["tokens"] == len(PROMPT) - 25
    assert http.delete(path(session)).json()["session"] == session
    assert http.get(path(session)).status_code == 404


@pytest.mark.parametrize("session", ["", "x" * 257, "a\tb", "a\x00b"])
def test_bad_names(http: httpx.Client, session: str) -> None:
    for answer in (
        http.get(path(session)),
        http.delete(path(session)),
        http.post(path(session, "/directives"), json={"directives": []}),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "session"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "directives"),
        ([], "body"),
        ({"directives": 5}, "directives"),
        ({"directives": [5]}, "directives[0]"),
        ({"directives": [{"start": 5, "end": 2}]}, "directives[0].end"),
        ({"directives": [{"start": 5, "end": 2000}]}, "directives[0].end"),
        (
            {"directives": [{"start": 0, "end": 9, "replacement": [512]}]},
            "directives[0].replacement[0]",
        ),
        ({"directives": [[0, 9, [], "amortize"], [5, 12, [], "amortize"]]}, "directives[1].start"),
        ({"directives": [], "session": "b"}, "session"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": "a", "policy": {"name": "clear_tool_outputs"}}, "policy"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "scrub": True}, "scrub"),
        (
            {"messages": [{"role": "user", "content": "a"}], "policy": {"name": "x"}},
            "policy.name",
        ),
    ],
)
def test_malformed_edits(http: httpx.Client, body: Any, param: str) -> None:
    begin(http, "malformed")
    before = http.get(path("malformed")).json()
    answer = http.post(path("malformed", "/directives"), json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    after = http.get(path("malformed")).json()
    assert {**before, "age_s": 0} == {**after, "age_s": 0}


def test_edits_of_nothing_are_refused(http: httpx.Client) -> None:
    begin(http, "emptied")
    edit = {"directives": [{"start": 0, "end": len(PROMPT)}]}
    answer = http.post(path("emptied", "/directives"), json=edit)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "empty_prompt"


def test_unknown_sessions(http: httpx.Client) -> None:
    edit = {"directives": [{"start": 0, "end": 2}]}
    answer = http.post(path("nobody", "/directives"), json=edit)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "source_missing"
    # With a target there is something to do: the session begins with it.
    assert http.post(path("nobody", "/directives"), json={"prompt": PROMPT}).status_code == 200
    assert http.get(path("nobody")).json()["tokens"] == len(PROMPT)


def test_sessions_belong_to_their_key() -> None:
    """I8: another key's session of the same name is another session."""
    with (
        running(settings=Settings(api_keys=("key-a", "key-b"))) as server,
        server.http("key-a") as a,
        server.http("key-b") as b,
    ):
        begin(a, "same")
        for answer in (b.get(path("same")), b.delete(path("same"))):
            assert answer.status_code == 404
        edit: dict[str, Any] = {"directives": [{"start": 5, "end": 30}]}
        answer = b.post(path("same", "/directives"), json=edit)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "source_missing")
        target = PROMPT[:3] + PROMPT[30:]  # exact rows are everybody's, so not what a makes below
        body = {
            "prompt": target,
            "max_tokens": 0,
            "leyline": {"session": "same", **edit},
        }
        report = b.post("/v1/completions", json=body).json()["leyline"]
        assert report["fallback"] == "source_missing"
        assert report["tokens"]["moved"] == 0
        # Nothing of it touched the first one's.
        view = a.get(path("same")).json()
        assert view["tokens"] == view["cached"] == view["exact"] == len(PROMPT)
        assert a.post(path("same", "/directives"), json=edit).json()["tokens"]["moved"] > 0
        assert b.get(path("same")).json()["exact"] == len(target)
        chat = {"messages": [{"role": "user", "content": "x"}], "leyline": {"session": "chat"}}
        assert a.post("/v1/chat/completions", json=chat | {"max_tokens": 1}).status_code == 200
        assert a.get(path("chat")).status_code == 200
        assert b.get(path("chat")).status_code == 404
        server.settled()

"""/v1/leyline/turns: what became of each turn, and that its numbers are the reports'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from agent_run import ask, history, run_agent, turns_of
from tiny_server import Running, running, tiny_engine, tiny_tokenizer, words

from leyline.api.inspect import WHY
from leyline.channel import Fallback

PROMPT = tiny_tokenizer()(words(7, 120), add_special_tokens=False).input_ids


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as it:
        yield it


def complete(http: httpx.Client, session: str, prompt: list[int], **leyline: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 0, "leyline": {"session": session, **leyline}}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["leyline"]


def covers(pieces: list[dict[str, Any]], tokens: int) -> None:
    at = 0
    for each in pieces:
        assert each["start"] == at and each["tokens"] >= 0
        at += each["tokens"]
    assert at == tokens


def of_kind(turn: dict[str, Any], *kinds: str) -> int:
    return sum(part["tokens"] for part in turn["parts"] if part["kind"] in kinds)


def test_numbers_are_the_reports(http: httpx.Client) -> None:
    reports = run_agent(http, "numbers", 4)
    reports.append(ask(http, "numbers", history(4)[:-1], mode="repair", repair=10))
    reports.append(ask(http, "numbers", history(3)[2:], mode="forget"))
    turns = turns_of(http, "numbers")
    assert [turn["number"] for turn in turns] == [1, 2, 3, 4, 5, 6]
    assert [turn["report"] for turn in turns] == reports
    assert any(report["tokens"]["moved"] for report in reports)
    for turn in turns:
        tokens = turn["report"]["tokens"]
        covers(turn["parts"], tokens["prompt"])
        covers(turn["messages"], tokens["prompt"])
        assert of_kind(turn, "shared") == tokens["shared"]
        assert of_kind(turn, "moved", "copied") == tokens["moved"]
        assert of_kind(turn, "computed", "repaired") == tokens["computed"]
        assert of_kind(turn, "repaired") == turn["repaired"]
        assert (turn["state"], turn["reason"], turn["generated"]) == ("done", "length", 2)
        assert 0 < turn["ttft_s"] <= turn["whole_s"]
        for edit in turn["report"]["edits"]:
            evicted = [each for each in turn["evicted"] if each["start"] == edit["start"]]
            gone = edit["end"] - edit["start"]
            assert [each["tokens"] for each in evicted] == ([gone] if gone else [])


def test_each_message_has_its_tokens_and_text(http: httpx.Client) -> None:
    ask(http, "texts", history(2))
    (turn,) = turns_of(http, "texts", text="whole")
    messages = turn["messages"]
    assert [each["index"] for each in messages] == [*range(7), None]
    for sent, shown in zip(history(2), messages, strict=False):
        assert shown["role"] == sent["role"]
        assert shown["text"] == f"<|im_start|>{sent['role']}\n{sent['content']}<|im_end|>\n"
    assert messages[-1]["text"] == "<|im_start|>assistant\n"
    # Without being asked for, no text is told; in short, its beginning and its end.
    assert all(each["text"] is None for each in turns_of(http, "texts")[0]["messages"])
    long = [{"role": "user", "content": words(5, 900)}]
    ask(http, "long", long)
    short = turns_of(http, "long", text="short")[0]["messages"][0]["text"]
    assert len(short) < len(long[0]["content"]) / 2
    assert long[0]["content"][-40:] in short and long[0]["content"][:40] in short


def test_what_was_evicted_is_told_with_its_text(http: httpx.Client) -> None:
    old = history(3)
    ask(http, "evicted", old)
    ask(http, "evicted", [*old[:2], {"role": "tool", "content": "gone"}, *old[3:]])
    turn = turns_of(http, "evicted", text="whole")[1]
    evicted = turn["evicted"][0]
    assert evicted["text"] in old[2]["content"]
    assert len(evicted["text"]) > len(old[2]["content"]) - 10
    assert evicted["mode"] == "amortize"
    assert turn["report"]["edits"][0]["start"] == evicted["start"]


def test_moved_parts_say_where_they_lay(http: httpx.Client) -> None:
    complete(http, "source", PROMPT)
    target = [*PROMPT[:20], 9, 9, *PROMPT[50:], 7]
    complete(http, "source", target)
    turn = turns_of(http, "source")[1]
    (moved,) = [part for part in turn["parts"] if part["kind"] == "moved"]
    here, there, n = moved["start"], moved["source"], moved["tokens"]
    assert n > 50 and target[here : here + n] == PROMPT[there : there + n]
    assert (turn["source"], turn["endpoint"]) == (len(PROMPT), "completions")
    (evicted,) = turn["evicted"]
    assert (evicted["at"], evicted["start"], evicted["tokens"]) == (20, 20, 30)
    assert evicted["replacement_tokens"] == 2


def test_repaired_tokens_lie_behind_the_edit(http: httpx.Client) -> None:
    complete(http, "repair", PROMPT)
    complete(http, "repair", PROMPT[:20] + PROMPT[50:], mode="repair", repair=12)
    turn = turns_of(http, "repair")[1]
    parts = [(part["kind"], part["start"], part["tokens"]) for part in turn["parts"]]
    rest = len(PROMPT) - 30 - 20 - 12 - 1
    assert parts == [
        ("shared", 0, 20),
        ("repaired", 20, 12),
        ("moved", 32, rest),
        ("computed", 32 + rest, 1),
    ]
    assert turn["repaired"] == 12


def test_the_prefix_cache_it_is_measured_against_is_a_real_one() -> None:
    """The same prompts on an engine that serves sessions as plain requests."""
    more = tiny_tokenizer()(words(8, 60), add_special_tokens=False).input_ids
    prompts = [PROMPT, PROMPT[:30] + PROMPT[50:] + more, PROMPT[:10] + PROMPT[50:] + more + [5] * 9]
    with running(tiny_engine()) as server, server.http() as http:
        for prompt in prompts:
            complete(http, "measured", prompt)
        told = [turn["prefix_cache_computed"] for turn in turns_of(http, "measured")]
    with running(tiny_engine(directives=False)) as plain, plain.http() as other:
        reports = [complete(other, "measured", prompt) for prompt in prompts]
    assert [report["fallback"] for report in reports] == ["switched_off"] * 3
    assert told == [report["tokens"]["computed"] for report in reports]
    assert told[2] > len(more)


def test_rows_that_others_use_are_copied() -> None:
    with running(tiny_engine()) as server, server.http() as http:
        complete(http, "a", PROMPT)
        complete(http, "b", PROMPT)
        complete(http, "a", PROMPT[:20] + PROMPT[50:])
        turn = turns_of(http, "a")[1]
        assert turn["report"]["copied"]
        assert [part["kind"] for part in turn["parts"]] == ["shared", "copied", "computed"]


def test_other_routes_are_on_record_too(http: httpx.Client) -> None:
    body = {
        "model": "tiny",
        "max_tokens": 1,
        "system": "be brief",
        "messages": [{"role": "user", "content": words(3, 40)}],
        "leyline": {"session": "routes"},
    }
    assert http.post("/v1/messages", json=body).status_code == 200
    edit = {"directives": [{"start": 12, "end": 30}]}
    assert http.post("/v1/leyline/sessions/routes/directives", json=edit).status_code == 200
    first, second = turns_of(http, "routes", text="whole")
    assert [first["endpoint"], second["endpoint"]] == ["messages", "directives"]
    assert [each["role"] for each in first["messages"]] == ["system", "user", "assistant"]
    assert words(3, 40) in first["messages"][1]["text"]
    # No messages were sent: the prompt is what the directive made of the session.
    (whole,) = second["messages"]
    assert (whole["index"], whole["role"]) == (None, "")
    assert second["ttft_s"] is None and second["whole_s"] > 0 and second["generated"] == 0


def test_fallbacks_have_their_reason(http: httpx.Client) -> None:
    assert set(WHY) == set(Fallback)
    complete(http, "fallback", PROMPT, directives=[])
    (turn,) = turns_of(http, "fallback")
    reason = Fallback.SOURCE_MISSING
    assert turn["fallback"] == {"reason": reason, "why": WHY[reason]}


def test_requests_that_fail_are_on_record(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 0}
    strict = {"session": "failed", "strict": True, "directives": []}
    assert http.post("/v1/completions", json={**body, "leyline": strict}).status_code == 409
    long = {**body, "prompt": PROMPT * 100, "leyline": {"session": "failed"}}
    assert http.post("/v1/completions", json=long).status_code == 400
    bad = {"session": "failed", "directives": [[0, 10**6, [], "amortize"]]}
    complete(http, "failed", PROMPT)
    assert http.post("/v1/completions", json={**body, "leyline": bad}).status_code == 400
    first, second, _, fourth = turns_of(http, "failed")
    assert (first["state"], first["reason"]) == ("failed", "source_missing")
    assert second["reason"] == "context_length_exceeded" and "tokens" in second["error"]
    assert fourth["state"] == "failed" and "end" in fourth["error"]
    assert all(turn["report"] is None and turn["parts"] == [] for turn in (first, second, fourth))


def test_a_client_that_hangs_up_is_on_record(server: Running, http: httpx.Client) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
        "leyline": {"session": "hung up"},
    }
    with http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    server.settled()
    (turn,) = turns_of(http, "hung up")
    assert (turn["state"], turn["reason"]) == ("done", "abort")


def test_only_some_turns(http: httpx.Client) -> None:
    run_agent(http, "some", 4)
    where = {"session": "some"}
    answer = http.get("/v1/leyline/turns", params={**where, "last": 2}).json()
    assert [turn["number"] for turn in answer["turns"]] == [3, 4] and answer["older"] == 2
    assert [turn["number"] for turn in turns_of(http, "some", turn=2)] == [2]
    for query, status in (
        ({**where, "turn": 9}, 404),
        ({**where, "turn": 0}, 400),
        ({**where, "last": 0}, 400),
        ({**where, "text": "all"}, 400),
        ({"session": "never"}, 404),
        ({"session": ""}, 400),
        ({"session": "a\tb"}, 400),
        ({"session": "x" * 257}, 400),
        ({}, 400),
    ):
        answer = http.get("/v1/leyline/turns", params=query)
        assert answer.status_code == status, query
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["turns", "events", "a/b", "../x", "<script>", "a&b=c#d", "%2F"])
def test_names_are_data(http: httpx.Client, name: str) -> None:
    complete(http, name, PROMPT)
    listed = http.get("/v1/leyline/sessions").json()["sessions"]
    assert listed[0]["session"] == name
    answer = http.get("/v1/leyline/turns", params={"session": name}).json()
    assert (answer["session"], len(answer["turns"])) == (name, 1)


def test_the_list_sums_a_session_up() -> None:
    with running(tiny_engine()) as server, server.http() as http:
        assert http.get("/v1/leyline/sessions").json() == {"sessions": [], "more": 0}
        reports = run_agent(http, "summed", 4)
        complete(http, "newer", PROMPT)
        # A request without a session is nobody's.
        http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 0})
        newer, older = http.get("/v1/leyline/sessions").json()["sessions"]
        assert (newer["session"], older["session"]) == ("newer", "summed")
        assert (older["turns"], older["recorded"], older["state"]) == (4, 4, "done")
        for name in ("prompt", "computed"):
            assert older[name] == sum(report["tokens"][name] for report in reports)
        last = reports[-1]["tokens"]
        assert older["last_prompt"] == last["prompt"]
        assert older["last_cached"] == last["shared"] + last["moved"]
        told = [turn["prefix_cache_computed"] for turn in turns_of(http, "summed")]
        assert older["prefix_cache_computed"] == sum(told) > older["computed"]


def test_an_engine_without_a_tokenizer_has_no_texts() -> None:
    engine = tiny_engine()
    engine.tokenizer = None
    with running(engine) as server, server.http() as http:
        body = {"prompt": PROMPT, "max_tokens": 0, "leyline": {"session": "bare"}}
        assert http.post("/v1/completions", json=body).status_code == 200
        (turn,) = turns_of(http, "bare", text="whole")
        covers(turn["messages"], len(PROMPT))
        assert turn["messages"][0]["text"] == ""

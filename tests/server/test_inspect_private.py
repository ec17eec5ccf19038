"""Whose records are, how long they stay, and that what was to be forgotten is not in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from agent_run import ask, history, run_agent, turns_of
from tiny_server import Running, running, tiny_engine, tiny_tokenizer, until, words

from leyline.channel import Channel, EngineError
from leyline.engine.engine import Engine
from leyline.engine.request import Failed, Request, Sampling
from leyline.server.inspect.page import PATHS
from leyline.server.inspect.records import Bounds, Recording, Records, Sent, Turn
from leyline.server.limits import Settings

SECRET = "the password is swordfish"
ROUTES = ("/v1/leyline/sessions", "/v1/leyline/turns?session=same", "/v1/leyline/events")


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as it:
        yield it


@contextmanager
def events(http: httpx.Client, **query: Any) -> Iterator[Iterator[tuple[str, Any]]]:
    """The stream's events as (name, data)."""

    def read(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))

    with http.stream("GET", "/v1/leyline/events", params=query) as answer:
        assert answer.status_code == 200
        yield read(answer)


def everything(http: httpx.Client, session: str) -> str:
    """All that is told of a session, as one text."""
    with events(http, session=session) as stream:
        seen = [next(stream), next(stream)]
    return json.dumps([turns_of(http, session, text="whole"), seen])


# -- keys ----------------------------------------------------------------------------------------


def test_nothing_without_the_key_and_nothing_of_others() -> None:
    with (
        running(settings=Settings(api_keys=("key-a", "key-b"))) as server,
        server.http("key-a") as a,
        server.http("key-b") as b,
        httpx.Client(base_url=server.url) as nobody,
    ):
        ask(a, "same", history(1))
        ask(a, "other", history(1, 5))
        for route in ROUTES:
            answer = nobody.get(route)
            assert answer.status_code == 401 and "same" not in answer.text
            assert nobody.get(route, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert b.get("/v1/leyline/sessions").json()["sessions"] == []
        assert b.get("/v1/leyline/turns", params={"session": "same"}).status_code == 404
        ask(b, "same", history(2, 9))
        assert [turn["number"] for turn in turns_of(b, "same")] == [1]
        assert [each["session"] for each in b.get(ROUTES[0]).json()["sessions"]] == ["same"]
        with events(b, session="same") as stream:
            assert [s["session"] for s in next(stream)[1]["sessions"]] == ["same"]
            assert next(stream)[1]["turns"][0]["report"]["tokens"]["prompt"] > 200
            # Another key's doings are no news here.
            ask(a, "same", history(2))
            ask(b, "mine", history(1))
            assert {s["session"] for s in next(stream)[1]["sessions"]} == {"same", "mine"}
        assert b.delete("/v1/leyline/sessions/other").status_code == 404
        assert len(turns_of(a, "other")) == 1


def test_the_page_needs_no_key_and_has_no_data() -> None:
    with running(settings=Settings(api_keys=("key-a",))) as server, server.http() as a:
        ask(a, "hidden-name", history(1))
        with httpx.Client(base_url=server.url) as nobody:
            for path, (_, kind) in PATHS.items():
                answer = nobody.get(path)
                assert answer.status_code == 200 and answer.headers["content-type"] == kind
                assert answer.content and "hidden-name" not in answer.text
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert nobody.head(path).status_code == 200
            for path in ("/leyline/", "/leyline/other.js", "/leyline/%2e%2e/page.py", "/leylin"):
                assert nobody.get(path).status_code == 401


def test_the_page_loads_nothing_from_elsewhere_and_has_no_inline_code() -> None:
    with running(tiny_engine()) as server, server.http() as http:
        for path in PATHS:
            text = http.get(path).text.replace("http://www.w3.org/2000/svg", "")
            assert "://" not in text, path
            for forbidden in ("innerHTML", "insertAdjacentHTML", "document.write", "eval("):
                assert forbidden not in text, path
        page = http.get("/leyline").text
        assert "<script>" not in page and "style=" not in page and "onclick" not in page


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scrub", [False, True])
def test_a_dropped_session_is_off_the_record(http: httpx.Client, scrub: bool) -> None:
    name = f"dropped {scrub}"
    run_agent(http, name, 2)
    with events(http, session=name) as stream:
        assert [next(stream)[0], next(stream)[0]] == ["sessions", "turns"]
        answer = http.delete(f"/v1/leyline/sessions/{name}", params={"scrub": scrub})
        assert answer.status_code == 200
        news = dict([next(stream), next(stream)])
        assert "gone" in news
        assert name not in [each["session"] for each in news["sessions"]["sessions"]]
        # It begins anew, and the stream goes on with it.
        ask(http, name, history(1))
        while (event := next(stream))[0] != "turns":
            pass
        assert [turn["number"] for turn in event[1]["turns"]] == [1]
    assert [turn["number"] for turn in turns_of(http, name)] == [1]


def test_a_session_that_is_not_there_yet(http: httpx.Client) -> None:
    """Said once; a page that a restarted server knows nothing for must not go on showing turns."""
    with events(http, session="not yet") as stream:
        assert [next(stream)[0], next(stream)[0]] == ["sessions", "gone"]
        ask(http, "not yet", history(1))
        names = [next(stream)[0]]
        while names[-1] != "turns":
            names.append(next(stream)[0])
        assert "gone" not in names


def test_a_session_that_gives_way_is_off_the_record() -> None:
    with running(tiny_engine(max_sessions=2)) as server, server.http() as http:
        for name in ("first", "second", "third"):
            ask(http, name, history(1, len(name)))
        assert http.get("/v1/leyline/turns", params={"session": "first"}).status_code == 404
        listed = http.get("/v1/leyline/sessions").json()["sessions"]
        assert [each["session"] for each in listed] == ["third", "second"]


def test_an_expired_session_is_off_the_record() -> None:
    """By its own clock, whether or not the engine has looked at its own."""
    now = [0.0]
    records = Records(Bounds(ttl_s=60), clock=lambda: now[0])
    with tiny_engine() as engine:
        record(engine, records, "old", 5)
        now[0] = 50
        record(engine, records, "young", 6)
        now[0] = 61
        assert records.turns("", "old") is None
        assert [each.name for each in records.sessions("")] == ["young"]
        now[0] = 111
        assert records.sessions("") == []


def begun(records: Records, session: str) -> Recording:
    """A request that is about to be submitted."""
    recording = records.recording(Channel(session), "completions")
    assert recording is not None
    recording.begin()
    return recording


def test_a_turn_that_comes_after_the_end_is_the_first_of_a_new_session() -> None:
    """Idle for longer than sessions live, an engine drops them when the next request wakes it: that
    one is on record already."""
    now = [0.0]
    records = Records(Bounds(ttl_s=60), clock=lambda: now[0])
    with tiny_engine(session_ttl_s=60) as engine:
        engine.store.lineages._clock = lambda: now[0]
        engine.on_drop(records.drop)
        record(engine, records, "agent", 5)
        before = records.turns("", "agent")
        now[0] = 100
        record(engine, records, "agent", 6)
        record(engine, records, "agent", 7)
        after = records.turns("", "agent")
    assert before is not None and after is not None and before.serial != after.serial
    assert [(turn.number, turn.state) for turn in after.turns] == [(1, "done"), (2, "done")]


def test_a_session_that_gives_way_keeps_the_turn_that_runs() -> None:
    records = Records()
    with tiny_engine(max_sessions=1) as engine:
        engine.on_drop(records.drop)
        record(engine, records, "first", 5)
        record(engine, records, "first", 6)
        before = records.turns("", "first")
        recording = begun(records, "first")
        record(engine, records, "second", 7)
    after = records.turns("", "first")
    assert before is not None and after is not None and before.serial != after.serial
    assert [(turn.number, turn.state) for turn in after.turns] == [(1, "waiting")]
    (session,) = (each for each in records.sessions("") if each.name == "first")
    assert (session.begun, session.prompt, session.computed) == (1, 0, 0)
    recording.observe(Failed(EngineError("gone", "it is over")))
    assert [turn.state for turn in turns_in(records, "first")] == ["failed"]
    records.drop("", "first")
    assert records.turns("", "first") is None
    assert records._shares.keys() == {""} and len(records._shares[""].order) == 1


def test_records_of_waiting_turns_are_bounded_too() -> None:
    now = [0.0]
    records = Records(Bounds(sessions=2, ttl_s=60), clock=lambda: now[0])
    for name in "abc":
        begun(records, name)
    assert [each.name for each in records.sessions("")] == ["c", "b"]
    now[0] = 100
    assert len(records.sessions("")) == 2  # they are not idle


def test_a_session_deleted_while_it_runs_is_off_the_record(http: httpx.Client) -> None:
    body = {"prompt": words(9), "max_tokens": 5000, "stream": True, "ignore_eos": True}
    with http.stream(
        "POST", "/v1/completions", json={**body, "leyline": {"session": "running"}}
    ) as answer:
        next(answer.iter_lines())
        assert [turn["state"] for turn in turns_of(http, "running")] == ["running"]
        assert http.delete("/v1/leyline/sessions/running").status_code == 200
    assert http.get("/v1/leyline/turns", params={"session": "running"}).status_code == 404


def test_a_look_keeps_no_session_longer() -> None:
    with running(tiny_engine(max_sessions=2)) as server, server.http() as http:
        for name in ("first", "second"):
            ask(http, name, history(1, len(name)))
        assert http.get("/v1/leyline/sessions/first").json()["cached"] > 0
        ask(http, "third", history(1, 9))
        assert http.get("/v1/leyline/sessions/first").status_code == 404
        assert http.get("/v1/leyline/sessions/second").status_code == 200


def test_records_go_when_the_engine_is_reset() -> None:
    with running(tiny_engine()) as server, server.http() as http:
        ask(http, "reset", history(1))
        server.settled()
        server.engine.reset()
        assert http.get("/v1/leyline/sessions").json()["sessions"] == []


# -- bounds --------------------------------------------------------------------------------------


def record(
    engine: Engine,
    records: Records,
    session: str | Channel,
    seed: int,
    words_: int = 20,
    sent: Sent | None = None,
) -> None:
    """A real request, recorded as the server does."""
    prompt = tiny_tokenizer()(words(seed, words_), add_special_tokens=False).input_ids
    channel = session if isinstance(session, Channel) else Channel(session)
    recording = records.recording(channel, "completions", sent)
    assert recording is not None
    recording.begin()
    request = Request(np.array(prompt), Sampling(max_tokens=1), channel)
    events: list[Any] = []

    def on_event(event: Any) -> None:
        recording.observe(event)
        events.append(type(event).__name__)

    engine.submit(request, on_event)
    until(lambda: "Done" in events or "Failed" in events)


def turns_in(records: Records, session: str) -> tuple[Turn, ...]:
    seen = records.turns("", session)
    assert seen is not None
    return seen.turns


def test_turns_of_a_session_are_bounded() -> None:
    records = Records(Bounds(turns=3))
    with tiny_engine() as engine:
        for i in range(5):
            record(engine, records, "long", i)
    seen = records.turns("", "long")
    assert seen is not None
    assert [turn.number for turn in seen.turns] == [3, 4, 5]
    (session,) = records.sessions("")
    assert (session.begun, session.recorded) == (5, 3)


def test_sessions_are_bounded() -> None:
    records = Records(Bounds(sessions=2))
    with tiny_engine() as engine:
        for name in ("a", "b", "a", "c"):
            record(engine, records, name, ord(name))
    assert [each.name for each in records.sessions("")] == ["c", "a"]


def test_bytes_are_bounded_and_the_oldest_go_first() -> None:
    records = Records(Bounds(size=2000))
    with tiny_engine() as engine:
        for i in range(12):
            record(engine, records, "ab"[i % 2], i, 60)
    seen = [records.turns("", name) for name in "ab"]
    kept = [turn for each in seen if each is not None for turn in each.turns]
    assert 1500 < sum(turn.size for turn in kept) <= 2000
    numbers = sorted(turn.number for turn in kept)
    assert numbers[-2:] == [6, 6] and numbers[0] == 6 - (len(numbers) - 1) // 2


def test_bytes_of_one_owner_do_not_push_out_anothers() -> None:
    records = Records(Bounds(size=2000))
    with tiny_engine() as engine:
        record(engine, records, Channel("small", owner="a"), 1)
        for i in range(12):
            record(engine, records, Channel(f"big {i}", owner="b"), i, 60)
    assert [each.name for each in records.sessions("a")] == ["small"]
    assert records.sessions("b")[0].name == "big 11"
    assert 0 < len(records.sessions("b")) < 12


def test_sessions_of_one_owner_do_not_push_out_anothers() -> None:
    records = Records(Bounds(sessions=3))
    with tiny_engine() as engine:
        record(engine, records, Channel("old", owner="a"), 1)
        for name in "xyz":
            record(engine, records, Channel(name, owner="b"), ord(name))
    assert [each.name for each in records.sessions("a")] == ["old"]
    assert [each.name for each in records.sessions("b")] == ["z", "y"]


def test_a_refused_request_keeps_no_messages() -> None:
    records, channel = Records(), Channel("refused", directives=(), strict=True)
    with tiny_engine() as engine:
        record(engine, records, channel, 1, sent=Sent(with_secret(), None, None, 9000))
    (turn,) = turns_in(records, "refused")
    assert (turn.state, turn.reason) == ("failed", "source_missing")
    assert turn.sent is None and turn.size == 0


def test_what_a_body_has_besides_messages_counts_for_nothing() -> None:
    """Such as a million spaces at its end."""
    records, sent = Records(), Sent(with_secret(), None, None, 1_000_000)
    with tiny_engine() as engine:
        record(engine, records, "spaces", 1, sent=sent)
    (turn,) = turns_in(records, "spaces")
    assert turn.sent is not None and turn.sent.messages is sent.messages
    written = len(json.dumps(sent.messages))
    assert written <= turn.sent.size < written + 100
    assert turn.sent.size < turn.size < written + 1000


def refused(http: httpx.Client, session: str) -> None:
    """A request with messages that has no report."""
    strict = {"session": session, "strict": True, "directives": []}
    body = {"messages": with_secret(), "max_tokens": 1, "leyline": strict}
    assert http.post("/v1/chat/completions", json=body).status_code == 409


def test_a_dropped_session_with_only_refusals_is_off_the_record(http: httpx.Client) -> None:
    refused(http, "only refused")
    assert len(turns_of(http, "only refused")) == 1
    assert http.delete("/v1/leyline/sessions/only%20refused").status_code == 404
    assert http.get("/v1/leyline/turns", params={"session": "only refused"}).status_code == 404


def test_a_server_started_anew_has_records_of_its_own() -> None:
    """A page that saw those of the one before must not mix them; it counts exactly up to 2**53."""
    seen = set()
    for _ in range(3):
        with running(tiny_engine()) as server, server.http() as http:
            ask(http, "same", history(1))
            answer = http.get("/v1/leyline/turns", params={"session": "same"}).json()
            seen.add(answer["record"])
    assert len(seen) == 3 and 0 < min(seen) and max(seen) < 2**53 - 2**50


def test_streams_are_bounded_and_take_no_requests_place() -> None:
    with running(settings=Settings(max_open=1)) as server:

        def taken() -> bool:
            with server.http() as http, http.stream("GET", "/v1/leyline/events") as answer:
                return answer.status_code == 200

        with ExitStack() as streams, server.http() as http:
            open_ones = []  # one that nobody refers to would be closed
            for _ in range(Bounds().watchers):
                open_ones.append(
                    streams.enter_context(events(streams.enter_context(server.http())))
                )
                assert next(open_ones[-1])[0] == "sessions"
            answer = http.get("/v1/leyline/events")
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "too_many_streams"
            ask(http, "beside", history(1))
        until(taken)


def test_a_stream_does_not_hold_up_the_end() -> None:
    with ExitStack() as after:
        with running(grace_s=3600) as server:
            http = after.enter_context(server.http())
            stream = after.enter_context(events(http))
            assert next(stream)[0] == "sessions"
        assert list(stream) == []


# -- forgetting ----------------------------------------------------------------------------------


def with_secret() -> list[dict[str, Any]]:
    messages = history(2)
    messages[2] = {"role": "tool", "content": f"{words(50, 30)} {SECRET} {words(51, 30)}"}
    return messages


def without_secret() -> list[dict[str, Any]]:
    messages = with_secret()
    messages[2] = {"role": "tool", "content": "removed"}
    return messages


def test_what_was_to_be_forgotten_is_not_told(http: httpx.Client) -> None:
    """I5, for people: the text is gone, the numbers stay."""
    reports = [ask(http, "forget", with_secret())]
    assert SECRET in everything(http, "forget")
    reports.append(ask(http, "forget", without_secret(), mode="forget"))
    assert SECRET not in everything(http, "forget")
    first, second = turns_of(http, "forget", text="whole")
    assert first["wiped"] and not second["wiped"]
    assert [first["report"], second["report"]] == reports
    assert all(each["text"] is None for each in first["messages"])
    evicted = second["evicted"][0]
    assert (evicted["mode"], evicted["text"]) == ("forget", None) and evicted["tokens"] > 50
    assert "removed" in second["messages"][2]["text"]


def test_what_was_evicted_before_is_forgotten_too(http: httpx.Client) -> None:
    ask(http, "late", with_secret())
    ask(http, "late", without_secret())
    assert SECRET in turns_of(http, "late", text="whole")[1]["evicted"][0]["text"]
    ask(http, "late", without_secret()[1:], mode="forget")
    assert SECRET not in everything(http, "late")


def test_explicit_forgetting_with_scrub(http: httpx.Client) -> None:
    report = ask(http, "scrub", with_secret())
    n = report["tokens"]["prompt"]
    edit = {"directives": [{"start": 40, "end": n - 5, "mode": "forget"}], "scrub": True}
    answer = http.post("/v1/leyline/sessions/scrub/directives", json=edit)
    assert answer.status_code == 200, answer.text
    assert SECRET not in everything(http, "scrub")


def test_a_forget_that_removes_nothing_keeps_the_texts(http: httpx.Client) -> None:
    """Agents that always say forget still see their turns."""
    body = {"prompt": words(70, 40), "max_tokens": 0}
    leyline = {"session": "grows", "mode": "forget"}
    for more in ("", words(71, 40)):
        body["prompt"] = f"{body['prompt']} {more}".strip()
        assert http.post("/v1/completions", json={**body, "leyline": leyline}).status_code == 200
    first, second = turns_of(http, "grows", text="whole")
    assert second["report"]["edits"] == [] and not first["wiped"]
    assert first["messages"][0]["text"] == words(70, 40)


def test_another_session_keeps_its_text(http: httpx.Client) -> None:
    ask(http, "keeps", with_secret())
    ask(http, "forgets", with_secret())
    ask(http, "forgets", without_secret(), mode="forget")
    assert SECRET in everything(http, "keeps")
    assert SECRET not in everything(http, "forgets")

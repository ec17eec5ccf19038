"""/v1/leyline/sessions on real SGLang: the routes of Leyline's own server, with its answers."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from harness import Server

pytestmark = pytest.mark.sglang

N = 160
CUT = {"directives": [{"start": 20, "end": 60}]}


def tokens(n: int, seed: object) -> list[int]:
    dice = random.Random(str(seed))
    return [dice.randrange(4, 500) for _ in range(n)]


def path(session: str, rest: str = "") -> str:
    """Dots too: clients take `..` for the folder above."""
    return f"/v1/leyline/sessions/{quote(session, safe='').replace('.', '%2E')}{rest}"


def begin(server: Server, session: str, n: int = N, **fields: Any) -> list[int]:
    """A session with n tokens of its own, and what it generated; all but its last token."""
    prompt = tokens(n, session)
    answer = server.generate(prompt, 3, {"session": session}, **fields)
    return [*prompt, *answer.ids[:-1]]


def edit(server: Server, session: str, body: Any) -> tuple[int, Any]:
    return server.post(path(session, "/directives"), body)


def edited(server: Server, session: str, body: Any) -> dict[str, Any]:
    status, report = edit(server, session, body)
    assert status == 200, report
    counts = report["tokens"]
    assert counts["prompt"] == counts["shared"] + counts["moved"] + counts["computed"]
    return report


def shown(server: Server, session: str, **where: str) -> dict[str, Any]:
    answer = server.http.get(path(session), params=where)
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- the round trip ---------------------------------------------------------------------------


def test_a_session_shows_its_segments(server: Server) -> None:
    held = begin(server, "routes-shown")
    view = shown(server, "routes-shown")
    n = len(held)
    assert view.pop("age_s") >= 0
    assert view == {
        "session": "routes-shown",
        "tokens": n,
        "cached": n,
        "exact": n,
        "edits": 0,
        "max_rotations": 0,
        "segments": [{"start": 0, "tokens": n, "exact": True, "rotations": 0}],
    }
    report = edited(server, "routes-shown", CUT)
    assert report["tokens"] == {"prompt": n - 40, "shared": 20, "moved": n - 61, "computed": 1}
    assert report["session"] == "routes-shown" and report["policy"] == []
    assert [(e["start"], e["end"], e["shift"]) for e in report["edits"]] == [(20, 60, -40)]
    view = shown(server, "routes-shown")
    assert view["tokens"] == view["cached"] == n - 40, "and not the token that SGLang sampled"
    assert (view["exact"], view["edits"], view["max_rotations"]) == (20, 1, 1)
    assert [each["exact"] for each in view["segments"]] == [True, False, False]
    assert sum(each["tokens"] for each in view["segments"]) == n - 40


@pytest.mark.parametrize("page", ["1", "16"])
@pytest.mark.parametrize("body", ["directives", "prompt", "replaced"])
def test_the_next_request_computes_what_is_new(servers: Any, page: str, body: str) -> None:
    """An edit while a tool runs: nothing is left to move. Of a page that is not full, the rows are
    computed again."""
    server = servers("mla", "--page-size", page)
    session = f"routes-ahead-{body}"
    held = begin(server, session, 320)
    stub = [7, 8, 9] if body == "replaced" else []
    target = held[:64] + stub + held[128:]
    asked = {
        "directives": CUT | {"directives": [{"start": 64, "end": 128}]},
        "prompt": {"prompt": target},
        "replaced": {"directives": [[64, 128, stub, "amortize"]], "mode": "amortize"},
    }[body]
    report = edited(server, session, asked)
    assert report["tokens"]["moved"] > 150 and report["tokens"]["prompt"] == len(target)
    assert shown(server, session)["tokens"] == len(target)
    new = tokens(30, f"new {session}")
    then = server.generate([*target, *new], 1, {"session": session})
    assert then.report["edits"] == [] and then.report["fallback"] is None
    rest = len(target) % int(page)
    assert then.report["tokens"] == {
        "prompt": len(target) + 30,
        "shared": len(target) - rest,
        "moved": 0,
        "computed": 30 + rest,
    }
    assert then.cached == len(target) - rest


def test_edited_ahead_or_with_the_request(server: Server) -> None:
    """I4: the answer is the same; kept rows are."""
    held = begin(server, "routes-same-a")
    assert held == [*tokens(N, "routes-same-a"), *held[N:]]
    server.generate(held[:N], 3, {"session": "routes-same-b"})
    target = [*held[:30], 5, 6, *held[70:]]
    edited(server, "routes-same-a", {"prompt": target})
    prompt = [*target, *tokens(20, "same")]
    ahead, along = (
        server.generate(prompt, 12, {"session": f"routes-same-{which}"}) for which in "ab"
    )
    assert along.report["tokens"]["moved"] > 0 and ahead.report["tokens"]["moved"] == 0
    assert ahead.ids == along.ids


@pytest.mark.parametrize("mode", ["repair", "forget"])
def test_modes(server: Server, mode: str) -> None:
    session = f"routes-{mode}"
    held = begin(server, session)
    body: dict[str, Any] = {"directives": [{"start": 20, "end": 60, "mode": mode}]}
    if mode == "repair":
        body["directives"][0]["repair"] = 9
    report = edited(server, session, body)
    assert [each["mode"] for each in report["edits"]] == [mode]
    rest = len(held) - 60
    assert report["tokens"]["computed"] == (10 if mode == "repair" else rest)
    view = shown(server, session)
    assert view["edits"] == 1
    # What is computed right behind an exact row is exact.
    assert view["exact"] == (view["tokens"] if mode == "forget" else 20 + 9)


def test_edits_by_messages(server: Server) -> None:
    """While a tool runs: no turn of the assistant is opened, only what the tool says is new."""
    output = " ".join(f"row {i} of the table" for i in range(40))
    messages = [
        {"role": "user", "content": "please read the first of the files and then the second"},
        {"role": "tool", "tool_call_id": "1", "content": output},
        {"role": "assistant", "content": "i have read it and will read the other one now " * 3},
    ]
    leyline: dict[str, Any] = {"session": "routes-messages"}
    chat = {"model": "tiny", "messages": messages, "max_tokens": 2, "leyline": leyline}
    assert server.post("/v1/chat/completions", chat)[0] == 200
    policy = {"name": "clear_tool_outputs", "keep": 0, "placeholder": "[gone]"}
    body = {"messages": messages, "policy": policy, "chat_template_kwargs": {"unused": 1}}
    report = edited(server, "routes-messages", body)
    assert report["tokens"]["moved"] > 50 and len(report["edits"]) == 1
    assert report["policy"][0]["name"] == "clear_tool_outputs" and report["policy"][0]["tokens"]
    told = {"role": "tool", "tool_call_id": "2", "content": "it is short"}
    messages[1] |= {"content": policy["placeholder"]}
    chat |= {"messages": [*messages, told], "leyline": leyline}
    then = server.post("/v1/chat/completions", chat)[1]["leyline"]
    assert then["tokens"]["moved"] == 0 and then["edits"] == []
    assert then["tokens"]["shared"] == report["tokens"]["prompt"]
    assert 0 < then["tokens"]["computed"] < 30


def test_edits_by_text(server: Server) -> None:
    """As /v1/completions tokenizes it."""
    text = "the files of the table and the rows of the other table " * 4
    body = {"model": "tiny", "prompt": text, "max_tokens": 1, "leyline": {"session": "routes-text"}}
    status, answer = server.post("/v1/completions", body)
    assert status == 200
    report = edited(server, "routes-text", {"prompt": text})
    assert report["tokens"]["computed"] == 1
    assert report["tokens"]["prompt"] == answer["usage"]["prompt_tokens"]


def test_a_session_can_begin_with_an_edit(server: Server) -> None:
    prompt = tokens(50, "routes-begin")
    assert edited(server, "routes-begin", {"prompt": prompt})["tokens"]["computed"] == 50
    assert shown(server, "routes-begin")["tokens"] == 50
    assert edited(server, "routes-begin", {"directives": []})["tokens"]["shared"] == 49


# -- other requests ---------------------------------------------------------------------------


def test_plain_requests_get_the_same_tokens(servers: Any) -> None:
    """I1, I8: whatever was edited, a request without a session is SGLang's alone."""
    ours, alone = servers("mla"), servers("mla", plugin=False)
    held = begin(ours, "routes-plain")
    target = held[:20] + held[60:]
    edited(ours, "routes-plain", CUT)
    for prompt in ([*target, *tokens(9, "plain")], held):
        ours.flush(), alone.flush()
        server_answers = [server.generate(prompt, 8) for server in (ours, alone)]
        assert server_answers[0].ids == server_answers[1].ids
    begin(ours, "routes-plain")
    edited(ours, "routes-plain", CUT)
    answer = ours.generate([*target, 5], 8)
    assert answer.cached == 20, "nothing behind the edit"
    alone.flush()
    assert answer.ids == alone.generate([*target, 5], 8).ids


# -- refused ----------------------------------------------------------------------------------


def test_unknown_sessions(server: Server) -> None:
    for method in ("GET", "DELETE"):
        answer = server.http.request(method, path("routes-nobody"))
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("session_not_found", "session")
    status, answer_ = edit(server, "routes-nobody", CUT)
    assert (status, answer_["error"]["code"]) == (404, "source_missing")
    assert answer_["error"]["param"] == "session" and "routes-nobody" in answer_["error"]["message"]
    assert server.http.get(path("routes-nobody")).status_code == 404, "nothing was made of it"


MALFORMED: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "directives"),
    "a list": ([], "body"),
    "a number": ({"directives": 5}, "directives"),
    "no directive": ({"directives": [5]}, "directives[0]"),
    "backwards": ({"directives": [{"start": 5, "end": 2}]}, "directives[0].end"),
    "outside": ({"directives": [{"start": 5, "end": 2000}]}, "directives[0].end"),
    "no token": (
        {"directives": [{"start": 0, "end": 9, "replacement": [512]}]},
        "directives[0].replacement[0]",
    ),
    "overlap": (
        {"directives": [[0, 9, [], "amortize"], [5, 12, [], "amortize"]]},
        "directives[1].start",
    ),
    "another session": ({"directives": [], "session": "b"}, "session"),
    "no messages": ({"messages": []}, "messages"),
    "two targets": ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
    "policy of a prompt": ({"prompt": "a", "policy": {"name": "clear_tool_outputs"}}, "policy"),
    "tools of a prompt": ({"prompt": "a", "tools": []}, "tools"),
    "empty prompt": ({"prompt": []}, "prompt"),
    "empty text": ({"prompt": ""}, "prompt"),
    "unknown token": ({"prompt": [5, 512]}, "prompt"),
    "too long": ({"prompt": [5] * 9000}, "prompt"),
    "scrub without forget": ({"prompt": "a", "scrub": True}, "scrub"),
    "unknown policy": (
        {"messages": [{"role": "user", "content": "a"}], "policy": {"name": "x"}},
        "policy.name",
    ),
    "role": ({"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
    "tool": ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "x"}]}, "tools"),
    "salt": ({"directives": [], "cache_salt": 5}, "cache_salt"),
    "nothing left": ({"directives": [{"start": 0, "end": N + 2}]}, "prompt"),
    "too much": ({"directives": [{"start": 0, "end": 1, "replacement": [5] * 9000}]}, "prompt"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_edits(server: Server, name: str) -> None:
    """400 with the field; nothing has changed."""
    body, param = MALFORMED[name]
    session = "routes-malformed"
    if server.http.get(path(session)).status_code == 404:
        begin(server, session)
    before = shown(server, session)
    status, answer = edit(server, session, body)
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert answer["error"]["message"] and "leyline." not in answer["error"]["message"]
    after = shown(server, session)
    assert {**before, "age_s": 0} == {**after, "age_s": 0}
    codes = {"nothing left": "empty_prompt", "too much": "context_length_exceeded"}
    if name in codes:
        assert answer["error"]["code"] == codes[name]


def test_bodies_that_are_not_json(server: Server) -> None:
    answer = server.http.post(path("x", "/directives"), content=b"{")
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def test_strict_edits(server: Server) -> None:
    """409, which the clients must not send again."""
    begin(server, "routes-strict")
    server.flush()
    body = {"prompt": tokens(30, "strict"), "directives": [[0, 5, [], "amortize"]], "strict": True}
    answer = server.http.post(path("routes-strict", "/directives"), json=body)
    assert answer.status_code == 409, answer.text
    assert answer.json()["error"]["param"] == "strict"
    assert answer.json()["error"]["code"] == "source_missing"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("session", ["", "x" * 257, "a\tb", "a\x00b"])
def test_bad_names(server: Server, session: str) -> None:
    for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/directives")):
        answer = server.http.request(method, path(session, rest))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "session"


@pytest.mark.parametrize("session", ["a/b", "../../x", "..", "a/directives", "a b?c#d", "日本 🚀"])
def test_names_are_data(server: Server, session: str) -> None:
    held = begin(server, session)
    assert shown(server, session)["session"] == session
    assert edited(server, session, CUT)["session"] == session
    assert shown(server, session)["tokens"] == len(held) - 40
    assert server.http.delete(path(session)).json()["session"] == session
    assert server.http.get(path(session)).status_code == 404


def test_namespaces(server: Server) -> None:
    """I8: a session belongs to its salt and extra key."""
    held = begin(server, "routes-salted", cache_salt="s", extra_key="e")
    where = {"cache_salt": "s", "extra_key": "e"}
    assert server.http.get(path("routes-salted")).status_code == 404
    assert server.http.get(path("routes-salted"), params={"cache_salt": "s"}).status_code == 404
    assert shown(server, "routes-salted", **where)["cached"] == len(held)
    assert edit(server, "routes-salted", CUT)[0] == 404
    assert edited(server, "routes-salted", {**CUT, **where})["tokens"]["moved"] > 0
    assert server.http.delete(path("routes-salted")).status_code == 404
    assert server.http.delete(path("routes-salted"), params=where).status_code == 200


def test_api_keys_guard_the_routes(servers: Any) -> None:
    server = servers("mla", "--api-key", "secret")
    with httpx.Client(base_url=server.url, timeout=60) as http:
        key = {"Authorization": "Bearer secret"}
        for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/directives")):
            body = {"json": {"prompt": [5, 6]}} if method == "POST" else {}
            assert http.request(method, path("keyed", rest), **body).status_code == 401
        assert http.get(path("keyed"), headers=key).status_code == 404
        body = {"prompt": [5, 6, 7]}
        assert http.post(path("keyed", "/directives"), json=body, headers=key).status_code == 200
        assert http.get(path("keyed"), headers=key).json()["tokens"] == 3


def test_a_server_without_leyline_refuses(servers: Any) -> None:
    server = servers("mla", plugin=False)
    status, _ = server.post(path("x", "/directives"), CUT)
    assert status == 404, "--plain leaves the plugin out"


# -- dropped ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["1", "16"])
@pytest.mark.parametrize("scrub", [False, True])
def test_drop_frees_slots(servers: Any, page: str, scrub: bool) -> None:
    """I7: what is reported is what became free."""
    server = servers("mla", "--page-size", page)
    server.flush()
    session = f"routes-dropped-{scrub}"
    begin(server, session, probe=f"dropped-{page}-{scrub}")
    edited(server, session, CUT)
    before = server.slots()
    answer = server.http.delete(path(session), params={"scrub": scrub})
    report = answer.json()
    assert answer.status_code == 200 and report.pop("freed") == before.evictable
    assert report == {
        "session": session, "dropped": True, "kept_by_others": 0, "scrubbed": scrub,
    }  # fmt: skip
    after = server.slots()
    assert after.evictable == 0 and after.available == before.available + before.evictable
    for method in ("GET", "DELETE"):
        assert server.http.request(method, path(session)).status_code == 404
    slots = server.rows(f"dropped-{page}-{scrub}").slots.tolist()
    # What lies in those slots now, if the probe's own few rows don't.
    custom = {"probe": f"left-{page}-{scrub}", "slots": slots}
    server.generate([9], 1, sampling_params={"custom_params": custom})
    left = server.rows(f"left-{page}-{scrub}").keys[0]
    zero = (left.reshape(len(slots), -1) == 0).all(1)
    assert bool(zero[int(page) :].all() if scrub else not zero.any())


def test_drop_leaves_what_others_use(server: Server) -> None:
    server.flush()
    held = begin(server, "routes-shared")
    server.generate(held[:100], 1)
    report = server.http.delete(path("routes-shared")).json()
    assert (report["freed"], report["kept_by_others"]) == (len(held) - 100, 100)
    assert server.generate(held[:100], 1).cached == 99


def test_drop_wants_a_yes_or_no(server: Server) -> None:
    begin(server, "routes-kept")
    answer = server.http.delete(path("routes-kept"), params={"scrub": "maybe"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "scrub"
    assert server.http.get(path("routes-kept")).status_code == 200


@pytest.mark.parametrize("chunk", ["16", "-1"])
def test_drop_ends_what_runs(servers: Any, chunk: str) -> None:
    """I7: rows of a request that runs, decoding or still prefilling behind its source's rows, go
    when it has ended; others, also one whose id begins with its, go on."""
    server = servers("mla", "--chunked-prefill-size", chunk)
    server.flush()
    held = begin(server, "routes-running", 500)
    other = tokens(40, "other")
    alone = server.generate(other, 60).ids
    target = [*held[:100], *tokens(150, "stub"), *held[250:], *tokens(50, "more")]
    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(
                server.generate, target, 100, {"session": "routes-running"}, rid=f"rid-{chunk}"
            ),
            pool.submit(server.generate, other, 60, rid=f"rid-{chunk}-other"),
            pool.submit(server.generate, other, 60),
        ]
        while server.internal_state()["slots"]["uncached"] == 0:
            time.sleep(0.01)
        report = server.http.delete(path("routes-running"), params={"scrub": True})
        assert report.status_code == 200 and report.json()["dropped"]
        dropped, prefixed, plain = (run.result() for run in runs)
    assert plain.ids == prefixed.ids == alone
    assert prefixed.meta["finish_reason"]["type"] == "length"
    # Its id is how another's begins, so SGLang could not tell them apart: it may run on, but what
    # it had is gone when it ends.
    assert dropped.status == 200
    assert server.http.get(path("routes-running")).status_code == 404
    slots = server.slots()
    assert slots.add_up
    assert server.generate([*held, 5], 1).cached == 0
    assert server.generate(target, 1).cached == 100, "what the line before has computed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_dropped_sessions_request_is_aborted(server: Server, stream: bool) -> None:
    server.flush()
    session = f"routes-aborted-{stream}"
    prompt = tokens(N, session)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(server.generate, prompt, 5000, {"session": session}, stream=stream)
        while server.internal_state()["slots"]["uncached"] < 10:
            time.sleep(0.01)
        report = server.http.delete(path(session)).json()
        answer = run.result()
    assert report["dropped"]
    assert answer.status == 200
    last = answer.body
    if stream:
        last = json.loads(answer.body.strip().split("\n\n")[-2].removeprefix("data: "))
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < last["meta_info"]["completion_tokens"] < 5000
    slots = server.slots()
    assert slots.evictable == 0 and slots.available == slots.total, "all of it was its own"
    assert server.http.get(path(session)).status_code == 404


# -- at once ----------------------------------------------------------------------------------


def test_edits_and_requests_of_one_session_at_once(servers: Any) -> None:
    """I6, I7: whoever comes first, nothing fails for it and no slot is lost; a plain request gets
    its own tokens."""
    server = servers("mla", "--chunked-prefill-size", "64")
    server.flush()
    base = tokens(300, "at once")
    plain = server.generate(base, 6).ids
    outcomes: list[int] = []
    stop = threading.Event()

    def client(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(12):
            start = dice.randrange(10, 150)
            session = dice.choice(["once-a", "once-b"])
            what = dice.randrange(6)
            cut = [*base[:start], *tokens(5, start), *base[start + 40 :]]
            if what == 0:
                answer = server.http.delete(path(session), params={"scrub": dice.random() < 0.5})
                outcomes.append(answer.status_code)
            elif what == 1:
                outcomes.append(server.http.get(path(session)).status_code)
            elif what == 2:
                edits = {"directives": [[start, start + 10, [4, 5], "amortize"]]}
                outcomes.append(edit(server, session, edits)[0])
            elif what == 3:
                mode = dice.choice(["amortize", "forget"])
                outcomes.append(edit(server, session, {"prompt": cut, "mode": mode})[0])
            else:
                answer_ = server.generate(cut, dice.randrange(1, 12), {"session": session})
                outcomes.append(answer_.status)
        stop.set()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client, range(4)))
    # 404: dropped just before. 409: an edit whose session was dropped under it.
    assert set(outcomes) <= {200, 404, 409} and outcomes.count(200) > 20
    assert server.generate(base, 6).ids == plain
    slots = server.slots()
    assert slots.add_up and slots.protected == slots.uncached == 0
    assert replace(slots, evictable=0, available=slots.total).add_up

"""Edits on real servers: what is kept, what is said about it, and where the session goes on (I6,
I8)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from harness import Answer, Server
from reference import NEW, SETUPS, Case, Edit, Expected, Setup, expected, tokens


@pytest.fixture(scope="session", params=SETUPS, ids=str)
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param


@pytest.fixture
def server(setup: Setup, servers: Any) -> Server:
    """With an empty cache: prompts that begin alike share rows."""
    server = setup.start(servers)
    server.flush()
    return server


CASES = [
    Case("delete", 300, (Edit(100, 130),)),
    Case("replace", 300, (Edit(100, 130, 7),)),
    Case("grow", 300, (Edit(100, 103, 40),)),
    Case("insert", 300, (Edit(150, 150, 9),)),
    Case("shift 0", 300, (Edit(100, 110, 10),)),
    Case("at 0", 300, (Edit(0, 30, 4),)),
    Case("delete at 0", 300, (Edit(0, 32),)),
    Case("at the end", 300, (Edit(280, 300, 5),)),
    Case("end deleted", 300, (Edit(250, 300),)),
    Case("nothing new", 300, (Edit(100, 130, 7),), 0),
    Case("nothing new, deleted", 300, (Edit(100, 130),), 0),
    Case("only more", 300, (), 50),
    Case("two", 400, (Edit(50, 80, 5), Edit(250, 285))),
    Case("two, turned round", 400, (Edit(50, 80), Edit(250, 285, 6))),
    Case("two deleted", 400, (Edit(50, 80), Edit(250, 285))),
    Case("three", 400, (Edit(30, 40, 50), Edit(150, 190), Edit(300, 310, 3))),
    Case("there and back", 400, (Edit(40, 72), Edit(200, 200, 32))),
    Case("on pages", 320, (Edit(64, 96), Edit(160, 176, 16)), 16),
    Case("more than a chunk new", 300, (Edit(100, 130, 90),), 120),
]


def turn(server: Server, prompt: list[int], session: str, n: int = 1, **asked: Any) -> Answer:
    return server.generate(prompt, n, {"session": session, **asked})


def check(answer: Answer, plan: Expected, edits: tuple[Edit, ...], mode: str = "amortize") -> None:
    """The report is that of the plan, and SGLang counts the same."""
    report = answer.report
    assert report["fallback"] is None, report
    assert report["tokens"] == plan.tokens
    assert answer.cached == plan.cached
    assert answer.meta["prompt_tokens"] == plan.prompt
    shift, told = 0, []
    for edit in edits:
        shift = edit.new - (edit.end - edit.start)
        told.append((edit.start, edit.end, edit.new, shift, mode))
    behind = [kept.src for kept in plan.kept]
    fields = ("start", "end", "replacement_tokens", "shift", "mode")
    found = [tuple(each[field] for field in fields) for each in report["edits"]]
    last = max((kept.src + kept.n for kept in plan.kept), default=0)
    assert found == [each for each in told if each[1] < last], (found, behind)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_edit(setup: Setup, server: Server, case: Case) -> None:
    """All is kept but what is new and the ends of pages; the session finds all of it again, and
    nobody else more than what an ordinary prefill gives (I8)."""
    page = setup.page
    name = f"{setup} {case.name}"
    source, prompt = case.prompts(name)
    assert turn(server, source, name).report["edits"] == []
    plan = expected(case.edits, len(source), case.new, page)
    answer = turn(server, prompt, name, 3)
    edits = case.edits
    if case.edits and case.edits[-1].end == len(source):  # what follows it is new text as well
        last = case.edits[-1]
        edits = (*case.edits[:-1], Edit(last.start, last.end, last.new + case.new))
    check(answer, plan, edits)
    plain = server.generate(prompt + tokens("plain", 3, NEW))
    assert plain.cached == min(plan.amortized, plan.prompt + 2) // page * page
    held = prompt + answer.ids[:-1]
    again = turn(server, held + tokens("again", 3, NEW), name)
    check(again, expected((), len(held), 3, page), ())


def test_conversation(setup: Setup, server: Server) -> None:
    """Ten turns: in each, an older part of what the session has is cut down or grows."""
    page = setup.page
    name = f"{setup} conversation"
    held = tokens(name, 200)
    held += turn(server, held, name, 2).ids[:-1]
    cuts = [(120, 150, 4), (40, 60, 0), (90, 90, 20), (10, 11, 33), (0, 5, 1), (70, 90, 20)]
    for i in range(10):
        start, end, new = cuts[i % len(cuts)]
        case = Case(f"{name}{i}", len(held), (Edit(start, end, new),), 30)
        for at, other in ((start, end), (start - 1, end - 1)):
            # A conversation's tokens are what they are: these edits must be the only ones.
            if end > start and at >= 0 and held[at] == held[other]:
                pytest.skip("two ways to derive this edit")
        prompt = case.edited(held)
        answer = turn(server, prompt, name, 3)
        check(answer, expected(case.edits, len(held), 30, page), case.edits)
        held = prompt + answer.ids[:-1]


def test_move_or_copy(setup: Setup, server: Server) -> None:
    """Rows that somebody else asked for too are copied, and stay as they are for them; those of the
    session alone move, which takes no slots (I7)."""
    page = setup.page
    case = Case("used by others", 320, (Edit(96, 128, 7),))
    plan = expected(case.edits, 320, case.new, page)
    for others in (0, 200, 320):  # so much of the source
        name = f"{setup} used by others: {others}"
        source, prompt = case.prompts(name)
        turn(server, source, name)
        theirs = max(0, others - 1) // page * page
        assert not others or server.generate(source[:others]).cached == theirs
        before = server.slots().available
        answer = turn(server, prompt, name)
        check(answer, plan, case.edits)
        assert answer.report["copied"] == bool(others or page > 1)
        taken = before - server.slots().available
        whole, left = plan.prompt // page * page, others // page * page or plan.shared
        assert taken == whole - plan.shared - (320 - left)
        assert not others or server.generate(source[:others]).cached == theirs


def directive(start: int, end: int, new: list[int], mode: str, **more: int) -> dict[str, Any]:
    return {"start": start, "end": end, "replacement": new, "mode": mode, **more}


def test_directives(setup: Setup, server: Server) -> None:
    """Explicit directives of several modes: REPAIR computes the first tokens behind its edit."""
    page = setup.page
    name = f"{setup} directives"
    edits = (Edit(64, 80, 4), Edit(150, 160, 0, repair=20), Edit(250, 250, 6))
    case = Case(name, 320, edits)
    source, prompt = case.prompts()
    modes = [("amortize", {}), ("repair", {"repair": 20}), ("amortize", {})]
    given = [
        directive(e.start, e.end, tokens(f"{name}{i}", e.new, NEW), mode, **more)
        for i, (e, (mode, more)) in enumerate(zip(edits, modes, strict=True))
    ]
    turn(server, source, name)
    answer = turn(server, prompt, name, directives=given)
    plan = expected(edits, 320, case.new, page)
    assert answer.report["tokens"] == plan.tokens and answer.cached == plan.cached
    assert [each["mode"] for each in answer.report["edits"]] == [mode for mode, _ in modes]
    check(
        turn(server, prompt + tokens("more", 5, NEW), name),
        expected((), len(prompt), 5, page),
        (),
    )


def test_directives_that_touch(setup: Setup, server: Server) -> None:
    """A deletion and, right behind it, a replacement; only explicit directives can say so."""
    page = setup.page
    name = f"{setup} touching"
    edits = (Edit(64, 80), Edit(80, 95, 5))
    source, prompt = Case(name, 320, edits).prompts()
    given = [
        directive(64, 80, [], "amortize"),
        directive(80, 95, tokens(f"{name}1", 5, NEW), "amortize"),
    ]
    turn(server, source, name)
    answer = turn(server, prompt, name, directives=given)
    plan = expected(edits, 320, 8, page)
    assert answer.report["tokens"] == plan.tokens and answer.cached == plan.cached


@pytest.mark.parametrize("repair", [0, 5, 50, 1000])
def test_repair(setup: Setup, server: Server, repair: int) -> None:
    """Derived edits in mode REPAIR: so many tokens behind each are computed, over later edits."""
    page = setup.page
    name = f"{setup} repair {repair}"
    edits = (Edit(64, 80, 4, repair), Edit(150, 160, 0, repair))
    case = Case(name, 320, edits)
    source, prompt = case.prompts()
    turn(server, source, name)
    answer = turn(server, prompt, name, mode="repair", repair=repair)
    plan = expected(edits, 320, case.new, page)
    check(answer, plan, edits, "repair")


def test_source_is_kept_from_eviction(servers: Any) -> None:
    """I6: while a replacement is computed, another request would like the slots of the source, in
    use by nobody else just then: it waits."""
    server = servers("mla", "--max-total-tokens", "900")
    server.flush()
    case = Case("evicted", 300, (Edit(0, 1, 5),))
    source, prompt = case.prompts()
    turn(server, source, "evicted")
    params = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    both = {
        "input_ids": [prompt, tokens("other", 650)],
        "sampling_params": [
            {**params, "custom_params": {"leyline": {"session": "evicted"}}},
            params,
        ],
    }
    status, answers = server.post("/generate", both)
    assert status == 200, answers
    report = answers[0]["meta_info"]["leyline"]
    assert report["fallback"] is None
    assert report["tokens"] == expected(case.edits, 300, case.new).tokens


@pytest.mark.parametrize("other", [300, 420])
def test_others_leave_room(servers: Any, other: int) -> None:
    """I6, I7: what the rest of a prompt needs stays there while its replacement is computed, though
    the source is in use, so nothing can be evicted, and others wait for slots."""
    server = servers("mla", "--max-total-tokens", "900")
    server.flush()
    case = Case(f"room {other}", 300, (Edit(0, 1, 5), Edit(200, 203, 5)))
    source, prompt = case.prompts()
    turn(server, source, case.name)
    using = threading.Thread(target=server.generate, args=(source, 120))
    using.start()
    end = time.monotonic() + 30
    while server.internal_state()["slots"]["protected"] < 299:
        assert time.monotonic() < end, "nobody uses the source"
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    custom = {"custom_params": {"leyline": {"session": case.name}}}
    body = {
        "input_ids": [prompt, tokens("other", other)],
        "sampling_params": [params | custom, params],
    }
    status, answers = server.post("/generate", body)
    using.join()
    assert status == 200, answers
    report = answers[0]["meta_info"]["leyline"]
    assert report["fallback"] is None and report["copied"]
    assert report["tokens"] == expected(case.edits, 300, case.new).tokens

"""FORGET on real servers (I5): the answer is that of a server that never saw the span, and nothing
that read it is left for the session."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from harness import Answer, Rows, Server
from reference import NEW, Case, Edit, Setup, expected, tokens

TIED = 1e-3  # log-probability, fp32
ALONE = [Setup("mla", "float32"), Setup("gqa", "float32", 16)]


@pytest.fixture(scope="module", params=ALONE, ids=str)
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param


@pytest.fixture
def server(setup: Setup, servers: Any) -> Server:
    server = setup.start(servers)
    server.flush()
    return server


def ask(server: Server, prompt: list[int], n: int = 6, **asked: Any) -> Answer:
    leyline = {"session": "s", **asked} if asked.pop("session", True) else None
    return server.generate(prompt, n, leyline, return_logprob=True, top_logprobs_num=2)


def plain(server: Server, prompt: list[int], n: int = 6) -> Answer:
    return server.generate(prompt, n, return_logprob=True, top_logprobs_num=2)


def assert_same(found: Answer, wanted: Answer) -> None:
    for i, (one, other) in enumerate(zip(found.ids, wanted.ids, strict=True)):
        if one != other:
            (best, *_), (second, *_) = wanted.meta["output_top_logprobs"][i]
            assert best - second < TIED, (i, found.body, wanted.body)
            return
        assert abs(found.logprobs[i] - wanted.logprobs[i]) < TIED


def in_slots(server: Server, slots: list[int], name: str) -> Rows:
    """What lies in these slots now."""
    custom = {"probe": name, "slots": slots}
    server.generate(tokens(name, 3, NEW), 1, sampling_params={"custom_params": custom})
    return server.rows(name)


def zeros(rows: Rows) -> list[bool]:
    """For each row, whether nothing is in it."""
    both = [tensor.flatten(1) for tensor in (*rows.keys, *rows.values)]
    return [not bool(row.any()) for row in torch.cat(both, -1)]


def conversation(server: Server, edits: int) -> tuple[list[list[int]], list[int]]:
    """A session, edited so many times: what it had after each turn, and all slots it used."""
    held, said, slots = tokens(f"forget {edits}", 200), [], set()
    for i in range(edits + 1):
        if i:
            held = Case(f"edit {i}", 0, (Edit(150 - 30 * i, 164 - 30 * i, 3),), 9).edited(held)
        answer = server.generate(held, 3, {"session": "s"}, probe=f"turn-{edits}-{i}")
        assert not i or answer.report["tokens"]["moved"]
        held = held + answer.ids[:-1]
        said.append(held)
        slots |= set(server.rows(f"turn-{edits}-{i}").slots.tolist())
    return said, sorted(slots)


@pytest.mark.parametrize("edits", [0, 2])
@pytest.mark.parametrize("explicit", [False, True], ids=["derived", "explicit"])
def test_forget(setup: Setup, server: Server, explicit: bool, edits: int) -> None:
    """I5: tokens and log-probabilities of a fresh server; all rows behind the edit are gone,
    also those of earlier branches, and what is left is found by others and exact."""
    page = setup.page
    said, _ = conversation(server, edits)
    source = said[-1]
    span = Edit(40, 70, 2)
    case = Case("span", 0, (span,), 9)
    prompt = case.edited(source)
    asked: dict[str, Any] = {"mode": "forget"}
    if explicit:
        new = tokens("span0", 2, NEW)
        directive = {"start": 40, "end": 70, "replacement": new, "mode": "forget"}
        asked = {"directives": [directive]}
    before = server.slots().available
    answer = ask(server, prompt, **asked)
    report = answer.report
    shared = 40 // page * page
    assert (report["fallback"], report["copied"]) == (None, False)
    assert report["tokens"] == {
        "prompt": len(prompt),
        "shared": shared,
        "moved": 0,
        "computed": len(prompt) - shared,
    }
    assert answer.cached == shared
    told = [(e["start"], e["end"], e["shift"], e["mode"]) for e in report["edits"]]
    assert told == [(40, 70, -28, "forget")]
    assert report["kept_by_others"] == 0 and report["forgotten"] >= len(source) // page * page - 40
    slots = server.slots()
    # All that is cached is the prefix and this very request.
    assert slots.evictable == (len(prompt) + 5) // page * page
    assert slots.available == before + report["forgotten"] - (slots.evictable - shared)
    # What it had before finds no more than that prefix.
    assert server.generate(said[0], 1).cached == shared
    assert server.generate(prompt, 1).cached == (len(prompt) - 1) // page * page
    server.flush()
    assert_same(answer, plain(server, prompt))


def test_what_is_behind_is_exact(setup: Setup, server: Server) -> None:
    """I5: after FORGET the session's rows are exact: everybody finds all of them."""
    said, _ = conversation(server, 2)
    prompt = Case("exact", 0, (Edit(40, 70),), 5).edited(said[-1])
    answer = ask(server, prompt, mode="forget")
    held = prompt + answer.ids[:-1]
    assert plain(server, [*held, 450], 1).cached == len(held) // setup.page * setup.page
    # And the session goes on from there with edits as usual.
    edited = Case("afterwards", 0, (Edit(50, 70, 3),), 5).edited(held)
    plan = expected((Edit(50, 70, 3),), len(held), 5, setup.page)
    assert ask(server, edited).report["tokens"] == plan.tokens


@pytest.mark.parametrize("scrub", [False, True])
def test_scrub(setup: Setup, server: Server, scrub: bool) -> None:
    """I5: with `scrub` nothing is in the slots that were freed, now or by earlier edits; without,
    rows lie there as they were. Other people's rows are untouched."""
    other = tokens("somebody", 64)
    server.generate(other, 1, probe=f"other-{scrub}")
    theirs = server.rows(f"other-{scrub}")
    said, used = conversation(server, 2)
    prompt = said[-1][:40] + tokens("scrub", 9, NEW)
    server.generate(
        prompt, 1, {"session": "s", "mode": "forget", "scrub": scrub}, probe=f"s{scrub}"
    )
    now = set(server.rows(f"s{scrub}").slots.tolist())
    freed = [slot for slot in used if slot not in now]
    assert len(freed) > 100
    empty = zeros(in_slots(server, freed, f"freed-{scrub}"))
    # The request that looks has written over a few.
    assert sum(empty) >= len(freed) - 2 * max(setup.page, 3) if scrub else not any(empty)
    after = in_slots(server, theirs.slots.tolist(), f"theirs-{scrub}")
    for one, two in zip((*theirs.keys, *theirs.values), (*after.keys, *after.values), strict=True):
        assert torch.equal(one, two)
    assert server.generate(other, 1).cached == 63 // setup.page * setup.page


@pytest.mark.parametrize("who", ["plain", "session"])
def test_rows_of_others(setup: Setup, server: Server, who: str) -> None:
    """I5: rows that others asked for too stay for them, and are counted; the session's own go."""
    source = tokens(f"others {who}", 160)
    server.generate(source[:96], 1, {"session": "t"} if who == "session" else None)
    server.generate(source, 1, {"session": "s"})
    prompt = Case("others", 0, (Edit(32, 48),), 5).edited(source)
    answer = ask(server, prompt, mode="forget", scrub=True)
    report = answer.report
    assert (report["forgotten"], report["kept_by_others"]) == (64, 64)
    assert server.generate([*source, 450], 1).cached == 96
    server.flush()
    assert_same(answer, plain(server, prompt))


def test_nothing_to_forget(server: Server) -> None:
    """The first request of a session in mode FORGET is an ordinary one."""
    prompt = tokens("first", 50)
    report = ask(server, prompt, mode="forget", scrub=True).report
    assert (report["fallback"], report["forgotten"], report["tokens"]["computed"]) == (None, 0, 50)


def test_one_directive_forgets_for_all(setup: Setup, server: Server) -> None:
    """I5: with one directive in mode FORGET nothing is kept behind any, as the span could be
    anywhere before them."""
    source = tokens("mixed", 160)
    server.generate(source, 1, {"session": "s"})
    prompt = Case("mixed", 0, (Edit(48, 60), Edit(100, 110)), 5).edited(source)
    given = [
        {"start": 48, "end": 60},
        {"start": 100, "end": 110, "mode": "forget"},
    ]
    answer = ask(server, prompt, directives=given)
    assert answer.report["tokens"]["moved"] == 0
    assert answer.report["tokens"]["shared"] == 48
    assert answer.report["forgotten"] == 160 - 48
    server.flush()
    assert_same(answer, plain(server, prompt))


@pytest.mark.parametrize("more", [0, 5])
def test_without_an_edit(setup: Setup, server: Server, more: int) -> None:
    """I5: a prompt that only goes on, or is the very same, in mode FORGET: what earlier edits left
    amortized is not shared."""
    said, _ = conversation(server, 2)
    prompt = said[-1] + tokens("goes on", more, NEW)
    answer = ask(server, prompt, mode="forget")
    # The second edit was at 90, and its replacement has 3 tokens.
    assert answer.report["tokens"]["moved"] == 0 and answer.cached <= 93
    assert answer.report["forgotten"] > 0
    server.flush()
    assert_same(answer, plain(server, prompt))


@pytest.mark.parametrize("branches", [2, 259])
def test_branches(setup: Setup, server: Server, branches: int) -> None:
    """I5: all that the session has cached goes, however many ways it went from one trunk on; what
    it had to give up on the way went before."""
    if branches > 2 and setup.page > 1:
        pytest.skip("the same as with pages of one token")
    trunk = tokens("trunk", 160)
    for i in range(branches):
        server.generate([*trunk, *tokens(i, 3, NEW)], 1, {"session": "s"})
    prompt = [*trunk[:32], *trunk[96:], *tokens("end", 4, NEW)]
    report = ask(server, prompt, mode="forget", scrub=True).report
    assert report["kept_by_others"] == 0
    assert plain(server, [*trunk, 450], 1).cached == 32
    assert server.slots().add_up


def test_a_request_with_prompt_logprobs_is_the_sessions_too(setup: Setup, server: Server) -> None:
    """I5: nothing is spliced for it, but what it leaves is the session's, and is forgotten; also by
    such a request itself."""
    source = tokens("logprobs", 160)
    for _ in range(2):
        server.generate(source, 1, {"session": "s"})
        server.generate(source, 1, {"session": "s"}, return_logprob=True, logprob_start_len=0)
        forgetting = {"session": "s", "mode": "forget"}
        prompt = [*source[:32], *source[96:]]
        more = {"return_logprob": True, "logprob_start_len": 40} if _ else {}
        report = server.generate(prompt, 1, forgetting, **more).report
        assert (report["fallback"], report["kept_by_others"]) == (None, 0)
        assert report["forgotten"] >= 160 - 32 - setup.page
        assert plain(server, [*source, 450], 1).cached == 32
        server.flush()


@pytest.mark.parametrize("scrub", [False, True])
def test_while_another_request_of_the_session_runs(
    setup: Setup, server: Server, scrub: bool
) -> None:
    """I5: it is answered to its end, and what it has read is dropped then."""
    source = tokens(f"runs {scrub}", 160)
    server.generate(source, 1, {"session": "s"})
    params = {
        "max_new_tokens": 400,
        "ignore_eos": True,
        "custom_params": {"leyline": {"session": "s"}},
    }
    body = {"input_ids": [*source, 450], "sampling_params": params, "stream": True}
    with server.http.stream("POST", "/generate", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)  # it runs
        prompt = [*source[:32], *source[96:], 451]
        report = ask(server, prompt, 1, mode="forget", scrub=scrub).report
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert len(json.loads(last.removeprefix("data: "))["output_ids"]) == 400
    # The other one ran on: what it holds could not go at once.
    assert report["forgotten"] == 0 and report["kept_by_others"] >= 160 - 32
    assert plain(server, [*source, 452], 1).cached == 32
    assert ask(server, [*prompt, 453], 1).report["tokens"]["shared"] >= len(prompt) - setup.page
    assert server.slots().add_up

"""Sessions and everybody else on one server (I1, I8): requests without a session are answered as by
a server that has no Leyline and never saw a session."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from harness import Answer, Server
from reference import NEW, Case, Edit, tokens

CONVERSATIONS = 40  # in each of five rounds; nothing is evicted
TIED = 1e-3  # log-probability, fp32: sums over other batches and prefixes are rounded otherwise


def common(one: list[int], other: list[int]) -> int:
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    return n


@dataclass
class Exact:
    """What has been computed so far, each up to where its rows are no longer those that an ordinary
    prefill gives: the most that anybody may find."""

    sequences: list[tuple[list[int], int]] = field(default_factory=list)

    def add(self, sequence: list[int], exact: int) -> None:
        self.sequences.append((sequence, exact))

    def of(self, prompt: list[int]) -> int:
        found = (min(common(prompt, each), exact) for each, exact in self.sequences)
        return max(found, default=0)


@dataclass
class Session:
    """One conversation: what it has, and how much of that is exact at most."""

    name: str
    held: list[int] = field(default_factory=list)
    exact: int = 0
    source: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)


class World:
    """A server with Leyline that serves sessions and others, and one without that serves only the
    others."""

    def __init__(self, with_sessions: Server, plain: Server, seed: int) -> None:
        self.with_sessions, self.without = with_sessions, plain
        self.rng = random.Random(seed)
        self.exact = Exact()
        self.counts: Counter[str] = Counter()
        self.number = 0

    def new(self, n: int, among: range = NEW) -> list[int]:
        self.number += 1
        return tokens(f"{self.rng.random()}{self.number}", n, among)

    def turn(self, session: Session) -> None:
        """The session's next request; from the second on with an edit."""
        if not session.held:
            # Tokens of one text in a fixed order: sessions and others begin alike now and then.
            prompt, edits = TEXT[: self.rng.choice([40, 60])] + self.new(40, range(3, 400)), []
        else:
            start = self.rng.randrange(5, len(session.held) - 45)
            edits = [Edit(start, start + self.rng.choice([0, 4, 20]), self.rng.choice([3, 7]))]
            prompt = Case(f"{session.name}{self.number}", 0, tuple(edits), 5).edited(session.held)
            self.number += 1
        here, own = self.exact.of(prompt), common(session.held, prompt)
        answer = self.with_sessions.generate(prompt, 3, {"session": session.name})
        report = answer.report
        assert report["fallback"] is None
        exact = len(prompt) + 2
        if report["tokens"]["moved"]:
            first = report["edits"][0]
            exact = max(here, first["start"] + first["replacement_tokens"])
        if here < own:  # its own rows, not others' exact ones
            exact = min(exact, session.exact)
        session.source, session.prompt = session.held, prompt
        session.held, session.exact = prompt + answer.ids[:-1], exact
        self.exact.add(session.held, exact)
        self.counts["moved"] += answer.report["tokens"]["moved"] > 0

    def plain(self, prompt: list[int], shares_nothing: bool = False, **namespace: str) -> None:
        """A request without a session, to both servers."""
        n = self.rng.choice([1, 4])
        asked: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2, **namespace}
        found = self.with_sessions.generate(prompt, n, **asked)
        wanted = self.without.generate(prompt, n, **asked)
        self.same(found, wanted)
        assert found.meta.get("leyline") is None
        if shares_nothing or namespace:
            assert found.cached == wanted.cached
        else:
            allowed = min(self.exact.of(prompt), len(prompt) - 1)
            assert wanted.cached <= found.cached <= allowed, (found.meta, wanted.meta, allowed)
            self.counts["found more"] += found.cached > wanted.cached
        if not namespace:
            self.exact.add(prompt + found.ids[:-1], len(prompt) + n - 1)
        self.counts["plain"] += 1

    def same(self, found: Answer, wanted: Answer) -> None:
        for i, (one, other) in enumerate(zip(found.ids, wanted.ids, strict=True)):
            if one != other:
                (best, *_), (second, *_) = wanted.meta["output_top_logprobs"][i]
                assert best - second < TIED, (i, found.body, wanted.body)
                self.counts["tied"] += 1
                return
            assert abs(found.logprobs[i] - wanted.logprobs[i]) < TIED
        self.counts["same"] += 1

    def others(self, session: Session) -> None:
        """Requests of others that know what the session said."""
        choice = self.rng.randrange(7)
        prompt, edited = session.prompt, session.prompt != session.held and session.source
        if choice == 0:
            self.plain(self.new(1, range(508, 512)) + self.new(50), shares_nothing=True)
        elif choice == 1:
            self.plain(prompt)
        elif choice == 2 and edited:
            self.plain(session.source)
        elif choice == 3:
            self.plain(session.held + self.new(6))
        elif choice == 4:
            self.plain(prompt[: self.rng.randrange(2, len(prompt))] + self.new(5))
        elif choice == 5:
            self.plain(TEXT + self.new(5))
        else:
            name = self.rng.choice(["extra_key", "cache_salt"])
            self.plain(prompt, **{name: f"{session.name} {self.number}"})
            self.number += 1


TEXT = tokens("text", 70)


@pytest.mark.parametrize("seed", range(5))
def test_conversations(servers: Any, seed: int) -> None:
    """I1, I8: whatever sessions do in between, others get the tokens and log-probabilities of a
    server without Leyline; as many rows are cached for them as there or more, and never one that an
    ordinary prefill would give otherwise."""
    leyline, plain = servers(), servers("mla", plugin=False)
    leyline.flush()
    plain.flush()
    world = World(leyline, plain, seed)
    sessions: list[Session] = []
    begun = 0
    while begun < CONVERSATIONS or sessions:
        if begun < CONVERSATIONS and (len(sessions) < 4 or world.rng.random() < 0.3):
            sessions.append(Session(f"{seed}-{begun}"))
            begun += 1
        session = world.rng.choice(sessions)
        world.turn(session)
        if world.rng.random() < 0.7:
            world.others(session)
        if session.source and world.rng.random() < 0.5:
            sessions.remove(session)
    counts = world.counts
    print(dict(counts))
    assert counts["moved"] > CONVERSATIONS and counts["found more"] > 5
    assert counts["same"] > 20 * counts["tied"]
    assert leyline.slots().add_up


def test_two_sessions_that_do_the_same(server: Server) -> None:
    """I8: sessions with the very same requests share up to the edit, and behind it each has rows of
    its own; a third one finds what an ordinary prefill gives."""
    server.flush()
    source, prompt = Case("same twice", 200, (Edit(80, 100, 5),)).prompts()
    for name, cached in (("same 1", 0), ("same 2", 199)):
        assert server.generate(source, 1, {"session": name}).cached == cached
    slots = []
    for name in ("same 1", "same 2"):
        answer = server.generate(prompt, 1, {"session": name}, probe=name)
        moved = {"prompt": 193, "shared": 80, "moved": 100, "computed": 13}
        if name == "same 2":  # the replacement is there, and as exact as ever
            moved |= {"shared": 85, "computed": 8}
        assert answer.report["tokens"] == moved and answer.report["fallback"] is None
        slots.append(server.rows(name).slots.tolist())
    assert slots[0][:85] == slots[1][:85]
    assert not set(slots[0][85:]) & set(slots[1][85:])
    assert server.generate(prompt, 1, {"session": "same 3"}).cached == 85


@pytest.mark.parametrize("namespace", ["extra_key", "cache_salt"])
def test_namespace(server: Server, namespace: str) -> None:
    """I8: a session in another namespace is another one, even in name."""
    server.flush()
    source, prompt = Case(f"namespace {namespace}", 200, (Edit(80, 100, 5),)).prompts()
    name = {"session": "in a namespace"}
    for where in ({}, {namespace: "a"}, {namespace: "b"}):
        assert server.generate(source, 1, name, **where).cached == 0
    moved = [server.generate(prompt, 1, name, **{namespace: "a"}).report["tokens"]["moved"]]
    assert moved == [100]
    for where in ({}, {namespace: "b"}):
        report = server.generate(prompt, 1, name, **where).report
        assert report["tokens"]["moved"] == 100 and not report["copied"]
    assert server.generate(prompt, 1, **{namespace: "a"}).cached == 85
    assert server.generate(prompt, 1, **{namespace: "c"}).cached == 0

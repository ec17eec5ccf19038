"""I7: slots add up after anything that can happen, every request ends once, and many requests run
together."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from helpers import (
    ALL,
    PREFILL,
    ask,
    assert_same,
    check_slots,
    engine,
    fresh,
    generated,
    greedy,
    marked,
    nodes_of,
    tokens_of,
)

from leyline.channel import Channel, EngineError
from leyline.directive import Directive, Mode
from leyline.engine import scheduler
from leyline.engine.engine import Engine, Handle
from leyline.engine.request import Delta, Done, Event, Failed, QueueFull, Request, Sampling, Started
from leyline.engine.tree import PUBLIC


@dataclass
class Client:
    """One request, and all its events."""

    request: Request
    handle: Handle | None = None
    events: list[Event] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Done | Failed)

    def check(self) -> None:
        """Started at most once and first; one end, which is last; as many tokens as it says."""
        kinds = [type(event) for event in self.events]
        assert sum(kind in (Done, Failed) for kind in kinds) == 1, kinds
        assert kinds[-1] in (Done, Failed)
        assert Started not in kinds[1:] and (Delta not in kinds or kinds[0] is Started)
        last = self.events[-1]
        if isinstance(last, Done):
            said = sum(len(event.tokens) for event in self.events if isinstance(event, Delta))
            assert last.completion_tokens == said
            report = last.report
            assert report.shared + report.moved + report.computed == report.prompt


class Storm:
    """Random operations on an engine with few slots."""

    def __init__(self, made: Engine, seed: int) -> None:
        self.made = made
        self.rng = np.random.default_rng(seed)
        self.clients: list[Client] = []
        self.counts: Counter[str] = Counter()
        self.talks: dict[tuple[str, str], list[int]] = {}
        self.system = self.new(12)

    def new(self, n: int) -> list[int]:
        return self.rng.integers(3, 512, n).tolist()

    def pick(self, n: int) -> int:
        return int(self.rng.integers(0, n))

    def step(self) -> None:
        what = self.rng.choice(
            ["session"] * 10
            + ["plain"] * 5
            + ["abort"] * 4
            + ["drop", "scrub", "pause", "reset", "look"]
        )
        self.counts[what] += 1
        getattr(self, what)()

    def session(self) -> None:
        owner, session = [("", "a"), ("", "b"), ("", "c"), ("x", "a")][self.pick(4)]
        tokens = self.talks.get((owner, session), [])
        directives: tuple[Directive, ...] | None = None
        if not 40 < len(tokens) < 110:
            tokens = self.system + self.new(50)
        else:
            for _ in range(self.pick(3)):
                start = self.pick(len(tokens) - 20)
                tokens = tokens[:start] + self.new(self.pick(5)) + tokens[start + self.pick(18) :]
            if (
                self.pick(4) == 0
            ):  # explicit, and as likely as not wrong for what the session has by then
                mode = [Mode.AMORTIZE, Mode.AMORTIZE, Mode.FORGET][self.pick(3)]
                start = self.pick(100)
                directives = (Directive(start, start + self.pick(20), tuple(self.new(1)), mode),)
        tokens = tokens + self.new(self.pick(6) + 1)
        self.talks[owner, session] = tokens
        modes = [(Mode.AMORTIZE, 0)] * 6 + [(Mode.REPAIR, 7), (Mode.FORGET, 0)]
        way, repair = modes[self.pick(8)]
        channel = Channel(
            session,
            owner,
            mode=way,
            repair=repair,
            directives=directives,
            strict=self.pick(8) == 0,
            scrub=self.pick(2) == 0,
        )
        prompt = None if directives and self.pick(2) else np.array(tokens)
        self.submit(Request(prompt, self.sampling(), channel))

    def plain(self) -> None:
        known = [*self.talks.values(), self.system]
        tokens = known[self.pick(len(known))]
        tokens = tokens[: 1 + self.pick(len(tokens))] + self.new(self.pick(20))
        self.submit(Request(np.array(tokens), self.sampling(), None))

    def sampling(self) -> Sampling:
        kind = self.pick(6)
        if kind == 0:
            return Sampling(forced=tuple(self.new(1 + self.pick(12))))
        if kind == 1:
            return Sampling(max_tokens=self.pick(10), temperature=1.0, seed=kind)
        return greedy(self.pick(25))

    def submit(self, request: Request) -> None:
        client = Client(request)
        try:
            client.handle = self.made.submit(request, client.events.append)
        except QueueFull:
            self.counts["queue full"] += 1
            return
        self.clients.append(client)

    def abort(self) -> None:
        if self.clients:
            client = self.clients[-1 - self.pick(min(6, len(self.clients)))]
            assert client.handle is not None
            self.made.abort(client.handle)

    def drop(self) -> None:
        owner, session = [("", "a"), ("", "b"), ("x", "a"), ("x", "c")][self.pick(4)]
        self.made.drop_session(owner, session, scrub=self.pick(2) == 0)

    def scrub(self) -> None:
        self.made.call(self.made.store.scrub)

    def look(self) -> None:
        stats = self.made.stats()
        assert stats.free + stats.cached + stats.private == stats.capacity
        self.made.session("", "a")

    def reset(self) -> None:
        try:
            self.made.reset()
        except EngineError as error:
            assert error.reason == "busy"

    def pause(self) -> None:
        """Wait for everything to end: I7, and that each request has ended once."""
        for _ in range(20_000):
            if all(client.ended for client in self.clients):
                break
            self.made.call(lambda: None)
        else:
            raise AssertionError("requests hang")
        for client in self.clients:
            client.check()
            last = client.events[-1]
            if isinstance(last, Failed):
                self.counts[f"failed {getattr(last.error, 'reason', '')}"] += 1
            elif isinstance(last, Done):
                self.counts[last.reason] += 1
                self.counts[f"fallback {last.report.fallback}"] += 1
                self.counts["moved"] += last.report.moved > 0 and not last.report.copied
                self.counts["copied"] += last.report.copied
        self.clients.clear()
        check_slots(self.made)
        for key, node in nodes_of(self.made):
            assert not marked(key) or (len(node.users) == 1 and PUBLIC not in node.users)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_anything(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I7, I8: hundreds of random operations with evictions, retractions, aborts in the middle of
    splices and passes that raise. Between bursts slots add up and each request has had one end;
    afterwards plain requests are right."""
    caplog.set_level(logging.CRITICAL, logger="leyline.engine")
    name = ["llama", "deepseek_v2"][seed % 2]
    real, rng = scheduler.forward, np.random.default_rng(seed)
    retracted = [0]

    def now_and_then(*args: Any) -> Any:
        if rng.random() < 0.01:
            raise RuntimeError("a pass fails")
        return real(*args)

    def counted(self: Any, run: Any) -> None:
        retracted[0] += 1
        retract(self, run)

    retract = scheduler.Scheduler._retract
    monkeypatch.setattr(scheduler, "forward", now_and_then)
    monkeypatch.setattr(scheduler.Scheduler, "_retract", counted)
    with engine(
        name, slots=300, chunk=16, max_running=6, max_waiting=12, max_sessions=3, max_tokens=150
    ) as made:
        storm = Storm(made, seed)
        for _ in range(600):
            storm.step()
        storm.pause()
        monkeypatch.setattr(scheduler, "forward", real)
        for tokens in [storm.system, *storm.talks.values()]:
            prompt = np.array(tokens[:140])
            answer = ask(made, prompt, greedy(4, ALL))
            assert_same(answer, fresh(name, prompt, answer.tokens), 1e-4)
        storm.pause()
    counts = storm.counts
    assert (
        min(counts["moved"], counts["copied"], counts["abort"], counts["length"], counts["stop"])
        > 0
    ), counts
    assert counts["failed internal"] > 0 and retracted[0] > 0, (counts, retracted)
    assert sum(counts[f"fallback {f}"] for f in ("source_partly_evicted", "source_missing")) > 0, (
        counts
    )


@pytest.mark.parametrize("name", ["deepseek_v2", "llama"])
def test_many_decode_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 16 requests are decoded in one pass, and each gets the tokens it gets alone."""
    rng = np.random.default_rng(0)
    prompts = [tokens_of(rng, int(rng.integers(5, 60))) for _ in range(18)]
    sizes: list[int] = []
    real = scheduler.forward

    def watched(model: Any, tokens: Any, chunks: Any, *args: Any) -> Any:
        sizes.append(sum(len(chunk.positions) == 1 for chunk in chunks))
        return real(model, tokens, chunks, *args)

    monkeypatch.setattr(scheduler, "forward", watched)
    with engine(name, max_running=18) as made:
        handles = [made.submit(Request(prompt, greedy(30, ALL))) for prompt in prompts]
        answers = [handle.result() for handle in handles]
    assert max(sizes) >= 16
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == 30
        assert_same(answer, fresh(name, prompt, answer.tokens), 1e-4)


def test_requests_that_give_way() -> None:
    """With too few slots for all answers the newest give way, come back, and end as they would
    alone."""
    rng = np.random.default_rng(1)
    prompts = [tokens_of(rng, 20) for _ in range(6)]
    with engine(slots=200, max_tokens=120) as made:
        handles = [made.submit(Request(prompt, greedy(60, ALL))) for prompt in prompts]
        answers = [handle.result() for handle in handles]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer.tokens) == 60
            assert_same(answer, fresh("llama", prompt, answer.tokens), 1e-4)


def test_abort_of_a_request_that_gave_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last event is the end of an answer that had begun: "abort", with the tokens it had."""
    prompts = [tokens_of(np.random.default_rng(i), 20) for i in range(2)]
    with engine(slots=100, max_tokens=95) as made:
        clients = [Client(Request(prompt, greedy(70))) for prompt in prompts]
        retract = scheduler.Scheduler._retract

        def and_hang_up(self: Any, run: Any) -> None:
            retract(self, run)
            run.aborted = True

        monkeypatch.setattr(scheduler.Scheduler, "_retract", and_hang_up)
        for client in clients:
            client.handle = made.submit(client.request, client.events.append)
        while not all(client.ended for client in clients):
            made.call(lambda: None)
        for client in clients:
            client.check()
        ends = sorted(getattr(client.events[-1], "reason", "failed") for client in clients)
        assert ends == ["abort", "length"]


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "ended"])
def test_abort(when: str) -> None:
    """I7: at any moment; what was computed may be found again, and a plain request is right."""
    prompt, other = (
        tokens_of(np.random.default_rng(2), 200),
        tokens_of(np.random.default_rng(3), 50),
    )
    with engine(chunk=4, max_running=1) as made:
        blocker = made.submit(Request(other, greedy(30))) if when == "waiting" else None
        client = Client(Request(prompt, greedy(40)))
        client.handle = made.submit(client.request, client.events.append)
        wanted = {"waiting": 0, "prefill": 1, "decode": 4, "ended": 42}[when]
        while len(client.events) < wanted:
            made.call(lambda: None)
        made.abort(client.handle)
        while not client.ended:
            made.call(lambda: None)
        made.abort(client.handle)
        client.check()
        last = client.events[-1]
        if when == "waiting":
            assert isinstance(last, Failed) and getattr(last.error, "reason", "") == "aborted"
        else:
            assert isinstance(last, Done) and last.reason == (
                "length" if when == "ended" else "abort"
            )
        if blocker:
            assert blocker.result().tokens == generated("llama", other, 30)
        check_slots(made)
        answer = ask(made, prompt, greedy(4, ALL))
        assert_same(answer, fresh("llama", prompt, answer.tokens), 1e-4)


def test_queue_is_bounded() -> None:
    """More requests than may wait are refused at once; those taken are answered."""
    prompt = tokens_of(np.random.default_rng(4), 30)
    with engine(max_running=1, max_waiting=3) as made:
        taken, refused = [], 0
        for _ in range(12):
            try:
                taken.append(made.submit(Request(prompt, greedy(20))))
            except QueueFull as full:
                assert full.reason == "queue_full"
                refused += 1
        assert refused > 0 and len(taken) >= 3
        expected = generated("llama", prompt, 20)
        assert all(handle.result().tokens == expected for handle in taken)
        assert ask(made, prompt, greedy(20)).tokens == expected


def test_sessions_are_bounded() -> None:
    """A session that has to give way loses its rows too."""
    rng = np.random.default_rng(5)
    with engine(max_sessions=2, max_session_tokens=100) as made:
        for i in range(5):
            ask(made, tokens_of(rng, 40), session=f"s{i}")
        assert made.stats().sessions == 2 and made.stats().cached == 80
        ask(made, tokens_of(rng, 90), session="big")
        assert made.stats().sessions == 1 and made.stats().cached == 90


def test_drop_a_session_while_it_runs() -> None:
    """I7: its requests end, nothing of it is found again, others go on."""
    prompt, other = tokens_of(np.random.default_rng(6), 60), tokens_of(np.random.default_rng(7), 40)
    with engine() as made:
        running = made.submit(Request(prompt, greedy(500), Channel("s")))
        plain = made.submit(Request(other, greedy(30)))
        events = running.events()
        assert isinstance([next(events), next(events)][1], Delta)
        waiting = made.submit(Request(prompt[:30], PREFILL, Channel("s", mode=Mode.FORGET)))
        assert made.drop_session("", "s", scrub=True) is not None
        last = list(events)[-1]
        assert isinstance(last, Done) and last.reason == "abort"
        with pytest.raises(EngineError, match="aborted"):
            waiting.result()
        assert plain.result().tokens == generated("llama", other, 30)
        assert made.session("", "s") is None
        again = ask(made, prompt)
        assert again.report is not None and again.report.cached == 0


def test_close_ends_everything() -> None:
    """Requests that run or wait get one end each; the engine takes no more."""
    prompt = tokens_of(np.random.default_rng(8), 30)
    with engine(max_running=1) as made:
        clients = [Client(Request(prompt, greedy(3000))) for _ in range(3)]
        for client in clients:
            client.handle = made.submit(client.request, client.events.append)
        while not clients[0].events:
            made.call(lambda: None)
        made.close()
        for client in clients:
            assert isinstance(client.events[-1], Failed)
            assert getattr(client.events[-1].error, "reason", "") == "closing"
            client.check()
        with pytest.raises(EngineError, match="shutting down"):
            made.submit(Request(prompt))


@pytest.mark.parametrize("where", ["_compose", "_admit", "_take", "_must_wait"])
def test_failure_that_nobody_foresaw(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I7: everything ends with an error once, the cache is empty, and the engine goes on."""
    prompt = tokens_of(np.random.default_rng(9), 30)
    real = getattr(scheduler.Scheduler, where)
    calls: list[int] = []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("a bug")
        return real(*args)

    with engine(max_running=2) as made:
        ask(made, prompt, session="s")
        monkeypatch.setattr(scheduler.Scheduler, where, failing)
        clients = [Client(Request(prompt, greedy(50), c)) for c in (None, Channel("s"), None, None)]
        for client in clients:
            client.handle = made.submit(client.request, client.events.append)
        for _ in range(2000):
            made.call(lambda: None)
        for client in clients:
            client.check()
        assert any(getattr(c.events[-1], "error", None) is not None for c in clients)
        check_slots(made)
        answer = ask(made, prompt, greedy(4, ALL))
        assert_same(answer, fresh("llama", prompt, answer.tokens), 1e-4)

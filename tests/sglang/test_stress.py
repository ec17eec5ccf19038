"""Many sessions at once on a server far too small: nothing leaks, nothing is wrong (I6, I7).

Afterwards every conversation is held again, few at a time on a server with room. As far as both
times the same rows were kept, all answers must be the same; a turn that found less kept (evicted,
given way) ends the comparison. Log-probabilities differ by up to 1e-4: sums are rounded otherwise
in a batch.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Answer, Server

pytestmark = pytest.mark.slow

CLIENTS = 16
EDITS = 500  # a server
AT_ONCE = 3  # when it is held again
TIED = 1e-3  # log-probability; fp32


@dataclass
class Turn:
    """One request of a conversation, and what came of it."""

    prompt: list[int]
    n: int
    leyline: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    retracted: bool = False


def edited(rng: random.Random, source: list[int], edits: int) -> list[int]:
    """The source with so many spans replaced, deleted or inserted, and new tokens behind."""
    cuts = sorted(rng.sample(range(3, len(source) - 3), 2 * edits))
    prompt, at = [], 0
    for start, end in zip(cuts[::2], cuts[1::2], strict=True):
        prompt += source[at:start] + tokens(rng, rng.choice([0, 0, 3, 20]))
        at = end
    return prompt + source[at:] + tokens(rng, rng.randrange(1, 12))


def tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(n)]


class Client:
    """Holds conversations, one after the other; each session is its own."""

    def __init__(self, server: Server, number: int, turns: int) -> None:
        self.server, self.number, self.turns = server, number, turns
        self.rng = random.Random(number)
        self.conversations: list[list[Turn]] = []
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        source: list[int] = []
        for _ in range(self.turns):
            if not 60 < len(source) < 700 or self.rng.random() < 0.1:
                self.conversations.append([])
                source = self.ask(tokens(self.rng, self.rng.randrange(100, 400)), {})
            kind = self.rng.random()
            prompt = edited(self.rng, source, self.rng.choice([1, 1, 2, 3]))
            if kind < 0.12:
                self.hang_up(prompt)
                source = []
            elif kind < 0.2:
                self.plain()
            else:
                source = self.ask(prompt, self.mode())

    def ask(self, prompt: list[int], mode: dict[str, Any]) -> list[int]:
        """A turn of the session; returns what the session has now."""
        name = f"c{self.number}-{len(self.conversations)}"
        turn = Turn(prompt, self.rng.randrange(1, 24), {"session": name, **mode})
        answer = self.server.generate(
            prompt, turn.n, turn.leyline, priority=self.rng.randrange(3) or None
        )
        turn.ids, turn.report = answer.ids, answer.report
        turn.retracted = bool(answer.meta.get("num_retractions", 0))
        self.conversations[-1].append(turn)
        self.check(turn, answer.cached)
        return prompt + turn.ids

    def check(self, turn: Turn, cached: int) -> None:
        where = turn.report["tokens"]
        assert (
            where["prompt"]
            == len(turn.prompt)
            == sum(where[kind] for kind in ("shared", "moved", "computed"))
        ), turn.report
        assert where["shared"] + where["moved"] == cached, (turn.report, cached)
        self.counts["edits"] += bool(turn.report["edits"])
        self.counts["copied" if turn.report["copied"] else "moved"] += where["moved"] > 0
        self.counts["fallback"] += turn.report["fallback"] is not None
        self.counts["retracted"] += turn.retracted

    def mode(self) -> dict[str, Any]:
        kind = self.rng.random()
        if kind < 0.08:
            return {"mode": "forget", "scrub": self.rng.random() < 0.5}
        if kind < 0.16:
            return {"mode": "repair", "repair": self.rng.choice([0, 5, 50])}
        return {}

    def plain(self) -> None:
        """Without a session, from a prefix that one of its own conversations began with. (No more
        of it: exact rows are preferred, and would change what the session reads.)"""
        began = self.rng.choice(self.conversations)[0].prompt
        prompt = began[: self.rng.randrange(len(began))] + tokens(self.rng, 9)
        assert self.server.generate(prompt, self.rng.randrange(1, 8)).status == 200
        self.counts["plain"] += 1

    def hang_up(self, prompt: list[int]) -> None:
        """Ask and be gone before, while or after it is answered."""
        body = {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 60,
                "ignore_eos": True,
                "custom_params": {
                    "leyline": {"session": f"c{self.number}-{len(self.conversations)}"}
                },
            },
        }
        patience = self.rng.choice([0.01, 0.05, 0.2])
        try:
            httpx.post(f"{self.server.url}/generate", json=body, timeout=patience)
        except httpx.TimeoutException:
            self.counts["hung up"] += 1


def all_at_once(clients: list[Client]) -> Counter[str]:
    failed: list[BaseException] = []

    def run(client: Client) -> None:
        try:
            client.run()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return sum((client.counts for client in clients), Counter())


def held_again(server: Server, conversations: list[list[Turn]]) -> int:
    """Answers that had to be the same, and were."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(lambda each: _held_again(server, *each), enumerate(conversations)))


def _held_again(server: Server, number: int, conversation: list[Turn]) -> int:
    for same, turn in enumerate(conversation):
        again = server.generate(
            turn.prompt,
            turn.n,
            {**turn.leyline, "session": f"again{number}"},
            return_logprob=True,
            top_logprobs_num=2,
        )
        now, then = again.report, turn.report
        if (
            turn.retracted
            or then["fallback"]
            or now["fallback"]
            or now["edits"] != then["edits"]
            or now["tokens"]["moved"] != then["tokens"]["moved"]
        ):
            return same
        if again.ids != turn.ids:
            assert tied(again, turn.ids), parted(server, turn, again)
            return same
    return len(conversation)


def parted(server: Server, turn: Turn, again: Answer) -> str:
    """All there is to say of an answer that is another one now."""
    plain = server.generate(turn.prompt, turn.n).ids
    at = first_difference(again.ids, turn.ids)
    likeliest = again.meta["output_top_logprobs"][at]
    return (
        f"token {at} of {turn.n}: {turn.ids[at:]} then, {again.ids[at:]} now, {plain[at:]} for a "
        f"plain request; the likeliest: {likeliest}; {turn.report}; {turn.leyline}"
    )


def first_difference(one: list[int], other: list[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def tied(again: Answer, then: list[int]) -> bool:
    """Whether the answers part where two tokens are as likely as each other: sums are rounded
    otherwise when more is in a batch."""
    at = first_difference(again.ids, then)
    (best, *_), (second, token, *_) = again.meta["output_top_logprobs"][at]
    return token == then[at] and best - second < TIED


CASES = {
    "mla": ("--schedule-policy", "lpm", "--enable-mixed-chunk"),
    "gqa": (
        "--page-size", "16", "--disable-overlap-schedule",
        "--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_stress(kind: str, checkpoint: Callable[..., Path]) -> None:
    flags = ("--chunked-prefill-size", "128", "--max-running-requests", "12", *CASES[kind])
    model = checkpoint("mla without experts" if kind == "mla" else kind)
    # Every 17th step takes a request's rows away, whether there is room or not.
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "17"}
    room = "3072" if kind == "mla" else "4096"
    with Server(model, "--max-total-tokens", room, *flags, env=env) as server:
        clients = [Client(server, number, EDITS // CLIENTS + 1) for number in range(CLIENTS)]
        counts = all_at_once(clients)
        time.sleep(0.5)
        assert server.slots().add_up
        assert server.generate(tokens(random.Random(0), 60), 3).status == 200
    print(f"{kind}: {dict(counts)}")
    assert counts["edits"] > EDITS / 2 and counts["copied"] and counts["hung up"]
    assert counts["retracted"] and counts["fallback"]
    assert kind == "gqa" or counts["moved"]
    conversations = [each for client in clients for each in client.conversations]
    with Server(model, *CASES[kind]) as server:
        same = held_again(server, conversations)
    print(f"{kind}: {same} of {sum(map(len, conversations))} answers compared")
    assert same > EDITS / 8

"""Ceilings against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from made_up import session
from tiny_server import tiny_tokenizer

from leyline.replay.arms import ARMS, jobs_of
from leyline.replay.ceiling import best, ceiling
from leyline.traces import Session

MIN_KEEP = 16


def brute(prompt: list[int], earlier: list[list[int]], source: list[int] | None) -> int:
    """Most tokens that an exact prefix, and behind it runs of at least MIN_KEEP in order, cover."""
    exact = 0
    for other in earlier:
        n = 0
        while n < min(len(prompt), len(other)) and prompt[n] == other[n]:
            n += 1
        exact = max(exact, n)
    exact = min(exact, len(prompt) - 1)
    if source is None:
        return exact
    rows, columns = len(source) + 1, len(prompt) + 1
    run = np.zeros((rows, columns), dtype=int)
    most = np.zeros((rows, columns), dtype=int)
    for i in range(1, rows):
        for j in range(1, columns):
            most[i, j] = max(most[i - 1, j], most[i, j - 1])
            if source[i - 1] == prompt[j - 1]:
                run[i, j] = run[i - 1, j - 1] + 1
            for n in range(1, run[i, j] + 1):
                if n >= MIN_KEEP or n == i == j:
                    most[i, j] = max(most[i, j], most[i - n, j - n] + n)
    return int(min(max(most[-1, -1], exact), len(prompt) - 1))


@pytest.mark.parametrize("seed", range(4))
def test_a_splice_at_best(seed: int) -> None:
    """Random tokens, of which a span is replaced, and new ones: nothing repeats by chance."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 10**6, 120)
    start, end = 20 + seed, 50 + 3 * seed
    stub, new = rng.integers(0, 10**6, 5 * seed), rng.integers(0, 10**6, 9)
    prompt = np.concatenate([source[:start], stub, source[end:], new])
    other = np.concatenate([source[: 10 + 30 * seed], new])
    for given in (None, source):
        expected = brute(
            prompt.tolist(), [other.tolist()], None if given is None else given.tolist()
        )
        assert best(prompt, [other], given) == expected > 0


def test_a_prompt_sent_again_computes_its_last_token() -> None:
    prompt = np.arange(200)
    assert best(prompt, [prompt], None) == best(prompt, [prompt], prompt) == 199
    assert best(prompt, [], None) == 0
    longer = np.arange(300)
    assert best(prompt, [longer], None) == 199
    assert best(longer, [prompt], prompt) == 200


def test_prompts_differ_behind_the_head_that_is_compared_first() -> None:
    a, b = np.arange(200), np.arange(200)
    b[150:] += 1
    assert best(a, [b], None) == 150
    b[3] = 0
    assert best(a, [b], None) == 3


def test_recorded_sessions() -> None:
    """A splice hits most, and as much as is neither new nor a stub."""
    jobs = jobs_of([session(1, output=20), session(2, output=20)])
    found = {arm: ceiling(tiny_tokenizer(), jobs, arm, keep=2) for arm in ARMS}
    rates = {
        arm: sum(n for _, n in calls.values()) / sum(n for n, _ in calls.values())
        for arm, calls in found.items()
    }
    assert rates["truncate"] == rates["forget"] < rates["splice"] < 1
    assert {len(calls) for calls in found.values()} == {12}
    assert [n for (name, i), (_, n) in found["append"].items() if i == 0 and name == "s1"] == [0]


def test_sessions_share_what_they_begin_with() -> None:
    one, other = session(1), session(2)
    system = {"role": "system", "content": "you are " + "very " * 30 + "helpful"}
    shared = [Session(each.id, (system, *each.messages), ()) for each in (one, other)]
    found = ceiling(tiny_tokenizer(), jobs_of(shared), "truncate", keep=2)
    alone = ceiling(tiny_tokenizer(), jobs_of(shared[1:]), "truncate", keep=2)
    assert alone["s2", 0][1] == 0
    tokens = len(tiny_tokenizer()(system["content"]).input_ids)
    assert tokens <= found["s2", 0][1] <= tokens + 20

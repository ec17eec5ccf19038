"""From episodes to a report: sums, pairs, and what a reader is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyline.evals.arms import edited, new_mark
from leyline.evals.numbers import by_task, comparisons_of, lines_of
from leyline.evals.plots import draw
from leyline.evals.report import Results
from leyline.evals.store import Episode

Made = Callable[..., Episode]


@pytest.fixture
def episodes(episode: Made) -> tuple[Episode, ...]:
    """Two tasks, two seeds; truncate and splice solve more, and splice computes least."""
    return (
        episode(seed=0, solved=False, reason="steps", turns=20, prompt=4000, cached=3000),
        episode(seed=1),
        episode(task="config", seed=0, solved=False, reason="context"),
        episode(task="config", seed=1, solved=False, reason="answer: not JSON"),
        episode(arm="truncate", seed=0, cached=500),
        episode(arm="truncate", seed=1, cached=500, model_s=4.0),
        episode(arm="truncate", task="config", seed=0, cached=500),
        episode(arm="splice", seed=0, cached=900, moved=400, edits=8),
        episode(arm="splice", seed=1, solved=False, reason="time", fallbacks={"no_room": 1}),
        episode(arm="splice", seed=7),
    )


def results(episodes: tuple[Episode, ...], **given: Any) -> Results:
    settings = {"model": "m", "scripted": False, "steps": 50, "keep": 2, "temperature": None}
    facts: dict[str, Any] = dict(server={"kind": "leyline"}, settings=settings, asked=12)
    return Results(**{**facts, **given}, episodes=episodes)


def test_an_arms_line_sums_its_episodes(episodes: tuple[Episode, ...]) -> None:
    append, truncate, splice = lines_of(episodes)
    assert (append.arm, append.episodes, append.solved, append.rate) == ("append", 4, 1, 0.25)
    assert append.reasons == {"steps": 1, "solved": 1, "context": 1, "answer": 1}
    assert (append.turns, append.prompt, append.cached, append.computed) == (50, 7000, 5400, 1600)
    assert (truncate.rate, truncate.computed, truncate.model_s) == (1.0, 1500, 8.0)
    assert (splice.moved, splice.edits, splice.fallbacks) == (400, 8, {"no_room": 1})


def test_arms_are_compared_over_common_tasks_and_seeds(episodes: tuple[Episode, ...]) -> None:
    cleared, spliced, both = comparisons_of(episodes)
    assert (cleared.arm, cleared.beside, cleared.pairs) == ("truncate", "append", 3)
    kinds = (cleared.both, cleared.only_arm, cleared.only_beside, cleared.neither)
    assert kinds == (1, 2, 0, 0) and cleared.difference == pytest.approx(2 / 3)
    assert cleared.p == 0.5 and cleared.interval == (0.5, 1.0)
    assert (spliced.pairs, spliced.only_arm, spliced.only_beside) == (2, 1, 1)
    assert spliced.difference == 0 and spliced.p == 1.0
    assert (both.arm, both.beside, both.pairs) == ("splice", "truncate", 2)
    assert both.computed == pytest.approx((100 + 200) / (500 + 500))
    assert both.model_s == pytest.approx((2 + 2) / (2 + 4))


def test_shares_are_also_given_for_each_turn(episodes: tuple[Episode, ...]) -> None:
    cleared = comparisons_of(episodes)[0]
    computed = (500 * 3) / (1000 + 200 + 200)
    assert cleared.computed == pytest.approx(computed)
    assert cleared.computed_each_turn == pytest.approx(computed / (30 / 40))


def test_no_share_where_the_server_does_not_count(episode: Made) -> None:
    found = (episode(cached=None), episode(arm="truncate", cached=None))
    line, _ = lines_of(found)
    (compared,) = comparisons_of(found)
    assert line.cached is None and line.computed is None and compared.computed is None
    page = results(found).markdown()
    assert "doesn't say how many" in page


def test_an_episode_without_a_call_keeps_the_count(episode: Made) -> None:
    """Records of before have None there."""
    empty = episode(seed=1, turns=0, prompt=0, cached=None)
    (line,) = lines_of((episode(), empty))
    assert (line.cached, line.computed) == (800, 200)
    assert "doesn't say how many" not in results((episode(), empty)).markdown()
    (line,) = lines_of((episode(cached=None), empty))
    assert line.cached is None and line.computed is None


def test_by_task(episodes: tuple[Episode, ...]) -> None:
    assert by_task(episodes) == {
        "config": {"append": (0, 2), "truncate": (1, 1)},
        "purr": {"append": (1, 2), "truncate": (2, 2), "splice": (2, 3)},
    }


def test_the_page_has_the_numbers_and_the_notes(episodes: tuple[Episode, ...]) -> None:
    found = results(
        episodes, errors={"splice config 0": "HTTP 500"}, cut_short="reasons", command="leyline …"
    )
    page = found.markdown()
    for text in (
        "| append | 1 of 4 | 25.0% | 4.6% … 69.9% | 50 |",
        "| truncate | append | 3 | 2 | 0 | +66.7 points | +50.0 … +100.0 | 0.500 |",
        "| config | 0 of 2 | 1 of 1 |  |",
        "31.2 % without truncation, 45.5 % with it",
        "10 of 12 episodes (2 tasks, 3 seeds)",
        "1 episode came to no end",
        "splice config 0: HTTP 500",
        "What ended it: reasons.",
        "less was spliced than asked: 1 × no_room",
    ):
        assert text in page, text
    value = json.loads(json.dumps(found.as_json()))
    assert value["lines"][0]["interval"] == pytest.approx([0.0456, 0.6994], abs=1e-4)
    assert len(value["episodes"]) == 10 and value["comparisons"][2]["pairs"] == 2


def test_notes_say_what_a_rate_is_not(episode: Made) -> None:
    settings = {"model": "m", "scripted": True, "steps": 50, "keep": 2, "temperature": None}
    page = results((episode(),), settings=settings).markdown()
    assert "nothing of a model" in page and "31.2" not in page
    settings = {**settings, "scripted": False, "temperature": 0}
    page = results((episode(), episode(seed=1)), settings=settings).markdown()
    assert "the same episode over again" in page
    page = results((episode(digest="a"), episode(seed=1, digest="b"))).markdown()
    assert "Not all episodes had the same files: purr." in page


def test_notes_say_what_was_not_the_same_for_all(episode: Made) -> None:
    versions = {"leyline": "2", "python": "3"}
    page = results((episode(concurrency=1, versions=versions),) * 2).markdown()
    assert "Not all episodes" not in page
    old = episode(seed=1, versions={"python": "3"})
    busy = episode(seed=2, concurrency=8, versions=versions)
    page = results((episode(concurrency=1, versions=versions), old, busy)).markdown()
    assert "beside as many others (unknown, 1, 8 at once)" in page
    assert "with the same leyline: unknown, 2." in page and "same python" not in page


def test_the_picture_is_drawn(episodes: tuple[Episode, ...], episode: Made, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, found in (("all", episodes), ("uncounted", (episode(cached=None),))):
        draw(lines_of(found), "title", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_arms_edit_by_place_not_by_id() -> None:
    """Tool-call ids repeat in debug-gym; each output is still told from the others."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "u"}]
    for i in range(4):
        call = {"id": "same", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": f"a{i}", "tool_calls": [call]})
        output = f"out{i} " + "long " * 40
        messages.append({"role": "tool", "tool_call_id": "same", "content": output})
    body = {"model": "m", "messages": messages, "tools": ["t"]}
    assert edited("append", body, 2, "s") is body
    for arm in ("truncate", "splice"):
        sent = edited(arm, body, 2, "s")
        outputs = [m["content"] for m in sent["messages"] if m["role"] == "tool"]
        assert [output.split()[0] for output in outputs[2:]] == ["out2", "out3"]
        assert not any(output.startswith("out") for output in outputs[:2])
        assert sent["tools"] == ["t"]
        assert sent.get("leyline") == ({"session": "s"} if arm == "splice" else None)
    assert messages[2]["content"].startswith("out0")


def test_marks_are_as_long_and_none_comes_twice() -> None:
    marks = [new_mark() for _ in range(1000)]
    assert len({len(each) for each in marks}) == 1 and len(set(marks)) == len(marks)

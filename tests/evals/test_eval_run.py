"""The whole of this side against a real server: arms, records, going on, trouble. What is beside
is debug-gym's process in name only; see test_eval_debug_gym.py for the real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from beside import ASKS, fake
from plain_server import plain
from tiny_server import Running, running

from leyline import __version__
from leyline.evals import endpoint
from leyline.evals.arms import Key
from leyline.evals.endpoint import complete
from leyline.evals.episode import Settings
from leyline.evals.gym import Gym
from leyline.evals.report import Results
from leyline.evals.run import Options, check, evaluate
from leyline.evals.store import Store
from leyline.replay.client import CallError, Client

SETTINGS = Settings(model="", max_tokens=3, temperature=0.5, system_prompt="You fix bugs.")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as it:
        yield it


def run(
    server: Running,
    tmp_path: Path,
    options: Options,
    code: str = ASKS,
    settings: Settings = SETTINGS,
) -> Results:
    with Gym(fake(tmp_path, code)) as gym:
        return evaluate(server.url, options, settings, Store(tmp_path / "out"), gym)


def records(tmp_path: Path, key: Key) -> list[dict[str, Any]]:
    text = Store(tmp_path / "out").path(key).read_text()
    return [json.loads(line) for line in text.split("\n") if line]


def test_arms_send_the_same_but_for_what_they_clear(server: Running, tmp_path: Path) -> None:
    found = run(server, tmp_path, Options(("purr",)))
    assert not found.errors and len(found.episodes) == 3 == found.asked
    append, truncate, splice = found.lines
    assert append.solved == truncate.solved == splice.solved == 1
    assert append.turns == truncate.turns == splice.turns == 4
    assert append.prompt > truncate.prompt and (append.edits, truncate.edits) == (0, 0)
    assert splice.edits == 1 and splice.moved > 0 and not splice.fallbacks
    for line in found.lines:
        assert line.cached is not None and line.prompt == line.cached + (line.computed or 0)
        assert 0 < line.model_s < line.wall_s


def test_records_tell_what_was_sent_and_what_came(server: Running, tmp_path: Path) -> None:
    run(server, tmp_path, Options(("purr",), arms=("splice",)))
    lines = records(tmp_path, Key("splice", "purr", 0))
    messages = {line["message"]: line["is"] for line in lines if "message" in line}
    calls = [line for line in lines if "call" in line]
    assert len(calls) == 4
    outputs = [
        messages[i]["content"] for i in calls[3]["messages"] if messages[i]["role"] == "tool"
    ]
    assert outputs[0].startswith("[evicted") and outputs[1].startswith("1 of purr")
    for call in calls:
        tokens, usage = call["leyline"]["tokens"], call["usage"]
        assert usage["prompt_tokens"] == tokens["prompt"] and call["seconds"] > 0
        assert usage["completion_tokens"] <= 3 and call["answer"]["role"] == "assistant"
    assert calls[3]["leyline"]["edits"]
    end = lines[-1]["end"]
    assert end["versions"] == {"debug_gym": "0", "python": "3", "leyline": __version__}
    assert end["concurrency"] == 1


def test_episodes_share_nothing_in_the_cache(server: Running, tmp_path: Path) -> None:
    """Else an arm would find what the one before it left there."""
    run(server, tmp_path, Options(("purr", "grader"), seeds=2, arms=("append", "truncate")))
    before = [
        records(tmp_path, Key(arm, task, seed))
        for arm in ("append", "truncate")
        for task in ("purr", "grader")
        for seed in (0, 1)
    ]
    firsts = [next(line for line in lines if "call" in line) for lines in before]
    cached = [call["usage"]["prompt_tokens_details"]["cached_tokens"] for call in firsts]
    prompts = [call["usage"]["prompt_tokens"] for call in firsts]
    # What the template puts before the first word is the same, tools included.
    assert len(set(prompts)) == 1
    assert max(cached) < min(prompts) - len("You fix bugs.") // 2


def test_a_run_goes_on_where_it_stopped(server: Running, tmp_path: Path) -> None:
    first = run(server, tmp_path, Options(("purr",), arms=("append",)))
    more = run(server, tmp_path, Options(("purr",), seeds=2, arms=("append", "splice")))
    assert more.asked == 4 and len(more.episodes) == 4
    assert first.episodes[0] in more.episodes
    nothing_left = run(server, tmp_path, Options(("purr",), seeds=2), code="exit(1)\n")
    assert len(nothing_left.episodes) == 4 and len(nothing_left.errors) == 2
    store = Store(tmp_path / "out")
    with Gym(fake(tmp_path, ASKS)) as gym:
        with pytest.raises(ValueError, match="has episodes with keep 2, not 1"):
            evaluate(server.url, Options(("purr",)), replace(SETTINGS, keep=1), store, gym)


def test_a_smaller_run_keeps_the_report_of_the_others(server: Running, tmp_path: Path) -> None:
    whole = run(server, tmp_path, Options(("purr",)))
    part = run(server, tmp_path, Options(("purr",), arms=("append",)))
    assert {e.key for e in part.episodes} == {e.key for e in whole.episodes}
    assert part.asked == 3 and [line.arm for line in part.lines] == ["append", "truncate", "splice"]


def test_another_servers_episodes_stay_apart(server: Running, tmp_path: Path) -> None:
    options = Options(("purr",), arms=("append",))
    with plain(counts=True) as url, Gym(fake(tmp_path, ASKS)) as gym:
        evaluate(url, options, replace(SETTINGS, model="tiny"), Store(tmp_path / "out"), gym)
    with pytest.raises(ValueError, match="has episodes with server 'unknown', not 'leyline'"):
        run(server, tmp_path, options)


def test_a_count_left_out_is_zero_on_a_server_that_counts(tmp_path: Path) -> None:
    """This one's streams, which it is looked at with, have a count; its other answers none."""
    with plain(counts=True) as url, Gym(fake(tmp_path, ASKS)) as gym:
        options = Options(("purr",), arms=("append",))
        found = evaluate(url, options, SETTINGS, Store(tmp_path / "out"), gym)
    assert found.server["counts"] and [(e.cached, e.prompt) for e in found.episodes] == [(0, 28)]
    assert "doesn't say how many" not in found.markdown()


def test_an_episode_without_a_call_has_counted_nothing(server: Running, tmp_path: Path) -> None:
    code = ASKS.replace("range(4)", "range(0)")
    found = run(server, tmp_path, Options(("purr",), arms=("append",)), code)
    assert [(e.turns, e.cached, e.computed) for e in found.episodes] == [(0, 0, 0)]


def test_episodes_run_beside_each_other(server: Running, tmp_path: Path) -> None:
    found = run(server, tmp_path, Options(("purr", "config"), seeds=2, concurrency=4))
    assert len(found.episodes) == 12 and not found.errors and not found.lines[2].fallbacks
    assert {each.key for each in found.episodes} == set(Options(("purr", "config"), seeds=2).keys())
    assert {each.concurrency for each in found.episodes} == {4}


def test_processes_that_die_end_the_run_with_a_reason(server: Running, tmp_path: Path) -> None:
    found = run(server, tmp_path, Options(("purr", "config")), code="exit('broken install')\n")
    assert not found.episodes and len(found.errors) == 3
    assert all("broken install" in text for text in found.errors.values())
    assert found.cut_short == "3 episodes in a row came to no end"
    assert "Not all episodes were tried" in found.markdown()
    all_tried = run(server, tmp_path, Options(("purr",)), code="exit('broken install')\n")
    assert len(all_tried.errors) == 3 and all_tried.cut_short is None
    assert "Not all episodes were tried" not in all_tried.markdown()


def test_a_prompt_too_long_ends_the_episode_not_the_run(tmp_path: Path) -> None:
    with running(max_tokens=400) as small:
        found = run(small, tmp_path, Options(("purr",), arms=("append",)))
    assert not found.errors
    (episode,) = found.episodes
    assert (episode.solved, episode.reason) == (False, "context") and 0 < episode.turns < 4


def test_a_body_too_large_ends_the_episode_not_the_run(server: Running, tmp_path: Path) -> None:
    """More than 16 MiB of what tools print: the server's refusal says nothing of a context."""
    code = ASKS.replace('"bar tin " * 40', '"bar tin " * 2_500_000')
    found = run(server, tmp_path, Options(("purr",), arms=("append",)), code)
    assert not found.errors
    assert [(e.solved, e.reason, e.turns) for e in found.episodes] == [(False, "context", 1)]


def test_time_that_is_up_ends_the_episode_not_the_run(server: Running, tmp_path: Path) -> None:
    code = ASKS.replace("reply =", "import time; time.sleep(600); reply =")
    options, settings = Options(("purr",), arms=("append",)), replace(SETTINGS, time_limit=3.0)
    (episode,) = run(server, tmp_path, options, code, settings).episodes
    assert (episode.solved, episode.reason) == (False, "time")


def test_splice_needs_a_server_with_sessions(tmp_path: Path) -> None:
    """A plain server ignores the field; its numbers would be those of truncate."""
    with plain() as url, Gym(fake(tmp_path, ASKS)) as gym:
        with pytest.raises(ValueError, match="arm splice needs a server"):
            evaluate(url, Options(("purr",)), SETTINGS, Store(tmp_path / "out"), gym)
        found = evaluate(
            url, Options(("purr",), arms=("append",)), SETTINGS, Store(tmp_path / "out"), gym
        )
    assert found.episodes[0].solved and found.episodes[0].cached is None


def test_what_can_not_be_run_is_refused() -> None:
    with pytest.raises(ValueError, match="no task 'chess'; there are config, "):
        check(Options(("chess",)), SETTINGS)
    with pytest.raises(ValueError, match="no scripted answers for pandas_dataframe"):
        check(Options(("pandas_dataframe",)), replace(SETTINGS, scripted=True))


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "AGAIN_S", (0.0, 0.0, 0.0))
    body = {"model": "plain", "messages": [{"role": "user", "content": "u"}]}
    with plain(refuse=[503, 429]) as url, Client(url) as client:
        reply = complete(client, body)
        assert (reply.prompt, reply.cached, reply.completion) == (7, None, 1)
    with plain(refuse=[503] * 9) as url, Client(url) as client:
        with pytest.raises(CallError, match="HTTP 503"):
            complete(client, body)
    with plain(refuse=[400]) as url, Client(url) as client:
        with pytest.raises(CallError, match="HTTP 400"):
            complete(client, body)  # a second try would be answered

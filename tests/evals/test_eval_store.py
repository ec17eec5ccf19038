"""A run goes on where it stopped, and never mixes what doesn't belong together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from leyline.evals.arms import Key
from leyline.evals.store import Episode, Store

KEY = Key("append", "purr", 0)
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "ü\u2028"}]


def test_a_finished_episode_is_read_back(tmp_path: Path, episode: Callable[..., Episode]) -> None:
    store, done = Store(tmp_path), episode(cached=None, fallbacks={"no_room": 2})
    assert store.get(KEY) is None
    with store.writer(KEY) as writer:
        writer.call(MESSAGES, {"seconds": 1.5})
        writer.call([*MESSAGES, {"role": "tool", "content": "t"}], {"seconds": 2.5})
        assert store.get(KEY) is None
        writer.end(done)
    assert store.get(KEY) == done and done.computed is None


def test_records_of_before_are_read(tmp_path: Path, episode: Callable[..., Episode]) -> None:
    store = Store(tmp_path)
    with store.writer(KEY) as writer:
        writer.end(episode(concurrency=2))
    file = store.path(KEY)
    file.write_text(file.read_text().replace(', "concurrency": 2', ""))
    assert "concurrency" not in file.read_text()
    assert store.get(KEY) == episode()


def test_calls_name_their_messages(tmp_path: Path, episode: Callable[..., Episode]) -> None:
    """Each message stands in the file once; calls refer to them in order."""
    store, cleared = Store(tmp_path), {"role": "user", "content": "[cleared]"}
    with store.writer(KEY) as writer:
        writer.call(MESSAGES, {})
        writer.call([MESSAGES[0], cleared, MESSAGES[1]], {})
        writer.end(episode())
    lines = [json.loads(line) for line in store.path(KEY).read_text().split("\n") if line]
    known = {line["message"]: line["is"] for line in lines if "message" in line}
    calls = [[known[i] for i in line["messages"]] for line in lines if "call" in line]
    assert calls == [MESSAGES, [MESSAGES[0], cleared, MESSAGES[1]]]
    assert len(known) == 3


def test_half_an_episode_is_begun_anew(tmp_path: Path, episode: Callable[..., Episode]) -> None:
    store = Store(tmp_path)
    with store.writer(KEY) as writer:
        writer.call(MESSAGES, {"seconds": 1.5})
    assert store.get(KEY) is None
    with store.writer(KEY) as writer:
        writer.end(episode())
    assert "seconds" not in store.path(KEY).read_text()
    assert [path.name for path in store.path(KEY).parent.iterdir()] == ["purr-0.jsonl"]


def test_a_damaged_episode_is_refused(tmp_path: Path, episode: Callable[..., Episode]) -> None:
    store = Store(tmp_path)
    file = store.path(KEY)
    file.parent.mkdir(parents=True)
    for text in ("", "{}", '{"end": {"arm": "append"}}', "no json"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"purr-0\.jsonl: not a finished episode.*remove it"):
            store.get(KEY)
    with store.writer(KEY) as writer:
        writer.end(episode(seed=3))
    with pytest.raises(ValueError, match="is the episode"):
        store.get(KEY)


def test_other_settings_are_fine_until_an_episode_is_finished(
    tmp_path: Path, episode: Callable[..., Episode]
) -> None:
    store = Store(tmp_path)
    store.open({"steps": 50})
    store.open({"steps": 20})
    with store.writer(KEY) as writer:
        store.open({"steps": 10})
        writer.end(episode())
    with pytest.raises(ValueError, match="has episodes with steps 10, not 50"):
        store.open({"steps": 50})


def test_keys_are_those_of_finished_episodes(
    tmp_path: Path, episode: Callable[..., Episode]
) -> None:
    store, more = Store(tmp_path), Key("splice", "sum_tree", 12)
    assert store.keys() == []
    for key in (more, KEY):
        with store.writer(key) as writer:
            writer.end(episode(**asdict(key)))
    store.writer(Key("append", "purr", 1)).__exit__(None, None, None)
    (store.path(KEY).parent / "purr-0 copy.jsonl").write_text("")
    (store.path(KEY).parent / "purr-00.jsonl").write_text("")
    assert store.keys() == [KEY, more]


def test_other_settings_are_refused(tmp_path: Path, episode: Callable[..., Episode]) -> None:
    store = Store(tmp_path / "new" / "folder")
    store.open({"model": "m", "keep": 2})
    with store.writer(KEY) as writer:
        writer.end(episode())
    store.open({"model": "m", "keep": 2})
    with pytest.raises(ValueError, match="has episodes with keep 2, not 3; give another --out"):
        store.open({"model": "m", "keep": 3})
    with pytest.raises(ValueError, match="with top_p None, not 1"):
        store.open({"model": "m", "keep": 2, "top_p": 1})
    assert json.loads((store.folder / "settings.json").read_text()) == {"model": "m", "keep": 2}

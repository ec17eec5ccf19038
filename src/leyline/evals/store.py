"""Episodes as files, one each, so that a run that was ended goes on where it stopped.

`DIR/settings.json` has what all episodes share. `DIR/episodes/ARM/TASK-SEED.jsonl` has one episode:

    {"message": 0, "is": {…}}                            a message, when it is first sent
    {"call": 0, "messages": [0, 1], "usage": {…}, …}     a call: which messages, and what it cost
    {"end": {…}}                                         how it ended

It gets its name when it is whole; until then it ends in `.part`, and is begun anew.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from leyline.evals.arms import ARMS, Arm, Key


@dataclass(frozen=True, slots=True)
class Episode:
    """How one ended. reason: solved, steps (all used up), context (a prompt longer than the server
    takes), time, tests changed (they passed, but are not the task's), or what debug-gym couldn't
    read of an answer. Tokens and seconds are over its calls; cached is None where the server
    doesn't count. wall_s has tools in it, too. concurrency: so many ran at once; None in records
    that don't say."""

    arm: Arm
    task: str
    seed: int
    solved: bool
    reason: str
    turns: int
    prompt: int
    cached: int | None
    completion: int
    moved: int
    edits: int
    fallbacks: dict[str, int]
    model_s: float
    wall_s: float
    digest: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    concurrency: int | None = None

    @property
    def key(self) -> Key:
        return Key(self.arm, self.task, self.seed)

    @property
    def computed(self) -> int | None:
        return None if self.cached is None else self.prompt - self.cached


class Store:
    """A folder of episodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, settings: dict[str, Any]) -> None:
        """Begin, or go on. Raises ValueError where the folder has finished episodes of other
        settings."""
        file = self.folder / "settings.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        if file.exists() and self.keys():
            before = _read(file)
            for name in sorted({*before, *settings}):
                if before.get(name) != settings.get(name):
                    raise ValueError(
                        f"{self.folder}: has episodes with {name} {before.get(name)!r}, not "
                        f"{settings.get(name)!r}; give another --out, or the same settings"
                    )
        _write(file, json.dumps(settings, indent=2) + "\n")

    def path(self, key: Key) -> Path:
        return self.folder / "episodes" / key.arm / f"{key.task}-{key.seed}.jsonl"

    def keys(self) -> list[Key]:
        """Of all finished episodes, as their files' names say; arm by arm."""
        found = []
        for arm in ARMS:
            for file in sorted((self.folder / "episodes" / arm).glob("*-*.jsonl")):
                task, _, seed = file.stem.rpartition("-")
                if seed.isdecimal() and self.path(key := Key(arm, task, int(seed))) == file:
                    found.append(key)
        return found

    def get(self, key: Key) -> Episode | None:
        """The episode if it is finished. Raises ValueError for a file that is damaged."""
        file = self.path(key)
        if not file.exists():
            return None
        try:
            last = file.read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2]
            found = Episode(**json.loads(last)["end"])
        except (KeyError, TypeError, ValueError) as trouble:
            what = f"{file}: not a finished episode ({trouble}); remove it to run it again"
            raise ValueError(what) from trouble
        if found.key != key:
            raise ValueError(f"{file}: is the episode {found.key}; remove it to run it again")
        return found

    def writer(self, key: Key) -> Writer:
        return Writer(self.path(key))


class Writer:
    """An episode's file while it runs. Left without an end, it stays a part."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._part = file.with_suffix(".jsonl.part")
        file.parent.mkdir(parents=True, exist_ok=True)
        self._out = self._part.open("w", encoding="utf-8")
        self._known: dict[str, int] = {}
        self._calls = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._out.close()

    def call(self, messages: list[dict[str, Any]], facts: dict[str, Any]) -> None:
        """A call: the messages that were sent, and what to say about it."""
        line = {"call": self._calls, "messages": [self._number(each) for each in messages], **facts}
        self._calls += 1
        self._put(line)
        self._out.flush()

    def end(self, episode: Episode) -> None:
        self._put({"end": asdict(episode)})
        self._out.flush()
        os.fsync(self._out.fileno())
        self._out.close()
        self._part.replace(self._file)

    def _number(self, message: dict[str, Any]) -> int:
        text = json.dumps(message, sort_keys=True)
        if text not in self._known:
            self._known[text] = len(self._known)
            self._put({"message": self._known[text], "is": message})
        return self._known[text]

    def _put(self, line: dict[str, Any]) -> None:
        self._out.write(json.dumps(line) + "\n")


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as trouble:
        raise ValueError(f"{file}: can't be read ({trouble})") from trouble


def _write(file: Path, text: str) -> None:
    """Whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)

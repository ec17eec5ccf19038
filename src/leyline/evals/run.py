"""An evaluation: every task, seed and arm, each once, and a report over all that is finished."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from leyline.evals.arms import ARMS, Arm, Key
from leyline.evals.episode import Settings, run_episode
from leyline.evals.gym import TASKS, Gym, GymError
from leyline.evals.report import Results
from leyline.evals.scripted import SCRIPTS
from leyline.evals.store import Store
from leyline.replay.client import CallError, Client
from leyline.replay.server import look

IN_A_ROW = 3
"""So many episodes without an end, one after the other, and no more are begun."""

_LEAVE_S = 2.0
"""What threads get to come to an end where the evaluation is ended; a model's answer may take half
an hour more, so they are left in it."""


@dataclass(frozen=True, slots=True)
class Options:
    """Which episodes: tasks × seeds × arms, `concurrency` at once."""

    tasks: tuple[str, ...]
    seeds: int = 1
    arms: tuple[Arm, ...] = tuple(ARMS)
    concurrency: int = 1

    def keys(self) -> list[Key]:
        """Arms of one task and seed follow each other, so that what is there is in pairs."""
        return [
            Key(arm, task, seed)
            for seed in range(self.seeds)
            for task in self.tasks
            for arm in self.arms
        ]


def check(options: Options, settings: Settings) -> None:
    """Raises ValueError for what can't be run."""
    for task in options.tasks:
        if task not in TASKS:
            raise ValueError(f"no task {task!r}; there are {', '.join(TASKS)}")
        if settings.scripted and task not in SCRIPTS:
            raise ValueError(f"no scripted answers for {task}, only for {', '.join(SCRIPTS)}")


def evaluate(
    url: str,
    options: Options,
    settings: Settings,
    store: Store,
    gym: Gym,
    *,
    key: str | None = None,
    on_start: Callable[[int, int], None] = lambda done, asked: None,
    on_episode: Callable[[Key], None] = lambda key: None,
) -> Results:
    """Run what is not finished yet in the store. settings.model: "" for the server's first. The
    results are over all that is finished there, asked for now or before.

    on_start: gets the episodes that are finished already, and all; on_episode: after each.
    Raises ValueError for what can't be run; what goes wrong in an episode is in the results.
    """
    check(options, settings)
    with Client(url, key) as client:
        server = look(client, settings.model or None)
        if "splice" in options.arms and not server.sessions:
            raise ValueError(
                f"{server.url}: arm splice needs a server that knows the leyline object, and this "
                "one's answers carry no report"
            )
        settings = replace(settings, model=server.model, server=server.kind)
        store.open(asdict(settings))
        asked = options.keys()
        before = [each for each in store.keys() if store.get(each) is not None]
        left = [each for each in asked if each not in before]
        on_start(len(asked) - len(left), len(asked))
        work = _Work(client, gym, store, settings, options, on_episode, server.counts)
        cut_short = work.all(left)
    asked = list(dict.fromkeys([*asked, *before]))
    found = [store.get(each) for each in asked]
    episodes = tuple(each for each in found if each is not None)
    facts: dict[str, Any] = {**server.as_json(), "url": None}  # an address is no result
    shown = {**asdict(settings), "data": settings.data and Path(settings.data).name}
    return Results(facts, shown, len(asked), episodes, work.errors, cut_short)


class _Work:
    """Episodes by threads, `concurrency` of them."""

    def __init__(
        self,
        client: Client,
        gym: Gym,
        store: Store,
        settings: Settings,
        options: Options,
        on_episode: Callable[[Key], None],
        counts: bool,
    ) -> None:
        self._client, self._gym, self._store = client, gym, store
        self._settings, self._options, self._on_episode = settings, options, on_episode
        self._counts = counts
        self._name = f"debug-gym-{uuid.uuid4().hex[:12]}"
        self._stop = threading.Event()
        self._left = False
        self._lock = threading.Lock()
        self._failed = self._tried = 0
        self.errors: dict[str, str] = {}

    def all(self, keys: Sequence[Key]) -> str | None:
        """Run them. Returns why not all were tried, None if they were."""
        todo: queue.SimpleQueue[tuple[int, Key]] = queue.SimpleQueue()
        for each in enumerate(keys):
            todo.put(each)
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        # Daemons, as this process's end would wait for others.
        threads = [
            threading.Thread(target=self._some, args=(todo, ended), daemon=True)
            for _ in range(min(self._options.concurrency, len(keys)))
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                trouble = ended.get()
                if trouble is not None:
                    raise trouble
        except BaseException:
            self._left = True
            self._stop.set()
            self._gym.kill_all()  # else threads would wait for their processes
            end = time.monotonic() + _LEAVE_S
            for thread in threads:
                if thread.is_alive():
                    thread.join(max(0.0, end - time.monotonic()))
            raise
        if self._tried == len(keys):
            return None
        return f"{IN_A_ROW} episodes in a row came to no end"

    def _some(
        self,
        todo: queue.SimpleQueue[tuple[int, Key]],
        ended: queue.SimpleQueue[BaseException | None],
    ) -> None:
        """One thread's work: episodes until there are no more. Tells None, or what was wrong."""
        try:
            while True:
                self._one(*todo.get_nowait())
        except queue.Empty:
            ended.put(None)
        except BaseException as trouble:
            ended.put(trouble)

    def _one(self, i: int, key: Key) -> None:
        if self._stop.is_set():
            return
        try:
            self._run(i, key)
            trouble = None
        except (CallError, GymError) as error:
            trouble = str(error)
        if self._left:
            return
        with self._lock:
            self._tried += 1
            self._failed = 0 if trouble is None else self._failed + 1
            if trouble is not None:
                self.errors[f"{key.arm} {key.task} {key.seed}"] = trouble
            if self._failed >= IN_A_ROW:
                self._stop.set()
        self._on_episode(key)

    def _run(self, i: int, key: Key) -> None:
        run_episode(
            self._gym,
            self._client,
            self._store,
            key,
            self._settings,
            session=f"{self._name}-{i}",
            counts=self._counts,
            concurrency=self._options.concurrency,
        )

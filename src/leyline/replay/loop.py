"""The closed loop: so many sessions at once, each with one call after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread

from leyline.replay.arms import Arm, Job, leyline_of, marked, messages_of
from leyline.replay.client import Answer, CallError, Client


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one recorded call: an answer, an error's text, or neither: left out, as its
    prompt, or one before it, is longer than the server takes. edited: other messages were sent than
    recorded."""

    session: str
    call: int
    edited: bool = False
    answer: Answer | None = None
    error: str | None = None

    @property
    def left_out(self) -> bool:
        return self.answer is None and self.error is None


@dataclass(frozen=True, slots=True)
class Settings:
    """How an arm is run. keep: tool outputs that stay. mark: see arms.messages_of. name: goes
    before session names, so that no two runs share one."""

    arm: Arm
    concurrency: int
    keep: int
    gaps: bool
    mark: str
    name: str


@dataclass(frozen=True, slots=True)
class Run:
    """One arm at one concurrency. mark: what its prompts began with. wall_s: from the first call to
    the last answer."""

    arm: Arm
    concurrency: int
    mark: str
    wall_s: float
    outcomes: tuple[Outcome, ...]


def run_arm(
    client: Client,
    jobs: Iterable[Job],
    settings: Settings,
    on_call: Callable[[], None] = lambda: None,
) -> Run:
    """Workers take sessions from a queue, in order, until it is empty. Errors are outcomes.

    on_call: after each call, from any thread.
    """
    queue: SimpleQueue[tuple[Job, str]] = SimpleQueue()
    for i, job in enumerate(jobs):
        queue.put((job, f"{settings.name}-{i}"))
    stop = Event()

    def worker() -> list[Outcome]:
        done: list[Outcome] = []
        while not stop.is_set():
            try:
                job, name = queue.get_nowait()
            except Empty:
                break
            done += _session(client, job, name, settings, stop, on_call)
        return done

    began = time.perf_counter()
    try:
        outcomes = _together(worker, settings.concurrency)
    except BaseException:
        stop.set()
        raise
    wall = time.perf_counter() - began
    outcomes.sort(key=lambda outcome: (outcome.session, outcome.call))
    return Run(settings.arm, settings.concurrency, settings.mark, wall, tuple(outcomes))


def _together(worker: Callable[[], list[Outcome]], n: int) -> list[Outcome]:
    """What n workers come to. Whoever interrupts need not wait for a call that hangs: the threads
    are daemons."""
    came: SimpleQueue[list[Outcome] | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            came.put(worker())
        except BaseException as trouble:
            came.put(trouble)

    for _ in range(n):
        Thread(target=run, daemon=True).start()
    outcomes: list[Outcome] = []
    for _ in range(n):
        found = came.get()
        if isinstance(found, BaseException):
            raise found
        outcomes += found
    return outcomes


def _session(
    client: Client,
    job: Job,
    name: str,
    settings: Settings,
    stop: Event,
    on_call: Callable[[], None],
) -> list[Outcome]:
    """One session's calls, as session `name`. It ends at a prompt that is too long, as its agent
    would have to."""
    done: list[Outcome] = []
    full = False
    for i, call in enumerate(job.calls):
        if stop.is_set():
            break
        if not full:
            messages = messages_of(settings.arm, call, settings.keep)
            edited = messages != call.messages
            if i and settings.gaps and i <= len(job.gaps_s):
                stop.wait(job.gaps_s[i - 1])
            leyline = leyline_of(settings.arm, name)
            try:
                answer = client.ask(marked(messages, settings.mark), job.lengths[i], leyline)
                done.append(Outcome(job.session, i, edited, answer))
            except CallError as trouble:
                full = trouble.too_long
                error = None if full else str(trouble)
                done.append(Outcome(job.session, i, edited, error=error))
        else:
            done.append(Outcome(job.session, i))
        on_call()
    return done

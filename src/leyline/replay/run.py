"""A whole replay: every arm at every concurrency, each from an empty cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from leyline.replay.arms import ARMS, SESSIONS, Arm, Job, jobs_of
from leyline.replay.ceiling import Call, ceiling
from leyline.replay.client import Client
from leyline.replay.loop import Run, Settings, run_arm
from leyline.replay.numbers import comparisons_of, errors_of, lines_of
from leyline.replay.report import Results
from leyline.replay.server import Server, empty, look
from leyline.replay.turns import encode
from leyline.traces import Session

MARKS = 10**6


@dataclass(frozen=True, slots=True)
class Options:
    """arms: all that the server can, by default. skip, calls: of each session so many calls are
    left out first, and at most so many sent. answer: tokens to generate for each call; None for as
    many as the recorded answer has."""

    arms: tuple[Arm, ...] = ()
    concurrency: tuple[int, ...] = (1,)
    keep: int = 2
    gaps: bool = False
    answer: int | None = 1
    calls: int | None = None
    skip: int = 0


def replay_on(
    url: str,
    sessions: Sequence[Session],
    options: Options,
    *,
    model: str | None = None,
    key: str | None = None,
    tokenizer: Any = None,
    on_run: Callable[[Arm, int, int], Callable[[], None]] = lambda arm, n, calls: lambda: None,
) -> Results:
    """Replay sessions on the server at `url`.

    tokenizer: the server's, for ceilings, and to count recorded answers. on_run: gets arm,
    concurrency and calls of each run; what it returns is called after each call.
    Raises ValueError for what can't be run; what goes wrong in a call is in the results.
    """
    if options.answer is None and tokenizer is None:
        raise ValueError("recorded answers can't be counted without a tokenizer: --tokenizer")
    jobs = jobs_of(sessions, options.calls, options.answer or 1, options.skip)
    if options.answer is None:
        jobs = [_with_recorded_lengths(tokenizer, job) for job in jobs]
    with Client(url, key) as client:
        server = look(client, model)
        arms = _arms(options.arms, server)
        marks = (_mark(0), _mark(MARKS - 1)) if server.flush is None else ("", "")
        ceilings = {}
        if tokenizer is not None:
            ceilings = _ceilings(tokenizer, jobs, arms, options.keep, marks)
        runs, cut_short = _runs(client, server, jobs, arms, options, on_run)
    lines = lines_of(runs, ceilings)
    settings = asdict(options) | {
        "arms": arms,
        "answer": "as many as recorded" if options.answer is None else options.answer,
        "sessions": len(jobs),
        "copies": sum(job.is_copy for job in jobs),
        "calls": sum(len(job.calls) for job in jobs),
    }
    compared = comparisons_of(runs, lines)
    errors = errors_of(runs)
    return Results(server, settings, runs, tuple(lines), tuple(compared), errors, cut_short)


def _ceilings(
    tokenizer: Any, jobs: list[Job], arms: Sequence[Arm], keep: int, marks: tuple[str, str]
) -> dict[Arm, dict[Call, tuple[int, int]]]:
    try:
        return {arm: ceiling(tokenizer, jobs, arm, keep, marks) for arm in arms}
    except Exception as trouble:  # templates raise whatever they like
        what = f"the tokenizer's chat template can't render the sessions: {trouble}"
        raise ValueError(what) from trouble


def _arms(asked: tuple[Arm, ...], server: Server) -> tuple[Arm, ...]:
    """In the order of ARMS. Raises ValueError for sessions on a server that knows none."""
    missing = [arm for arm in asked if arm in SESSIONS and not server.sessions]
    if missing:
        raise ValueError(
            f"{server.url}: arm {missing[0]} needs a server that knows the leyline object, and "
            "this one's answers carry no report"
        )
    wanted = asked or [arm for arm in ARMS if server.sessions or arm not in SESSIONS]
    return tuple(arm for arm in ARMS if arm in wanted)


def _runs(
    client: Client,
    server: Server,
    jobs: list[Job],
    arms: Sequence[Arm],
    options: Options,
    on_run: Callable[[Arm, int, int], Callable[[], None]],
) -> tuple[tuple[Run, ...], str | None]:
    """The finished runs, and why there are no more: hours of calls are not to be lost for it."""
    # Names and marks are new in every run, also beside those of an earlier replay.
    began = int(time.time())
    calls = sum(len(job.calls) for job in jobs)
    runs: list[Run] = []
    for concurrency, arm in product(options.concurrency, arms):
        number = began + len(runs)
        mark = "" if server.flush else _mark(number)
        name = f"replay-{number}-{arm}-{concurrency}"
        settings = Settings(arm, concurrency, options.keep, options.gaps, mark, name)
        try:
            if server.flush is not None:
                empty(client, server.flush)
            runs.append(run_arm(client, jobs, settings, on_run(arm, concurrency, calls)))
        except (Exception, KeyboardInterrupt) as trouble:
            if not runs:
                raise
            return tuple(runs), f"{arm} at {concurrency}: {trouble or type(trouble).__name__}"
    return tuple(runs), None


def _mark(number: int) -> str:
    """First words of a run's prompts: always as long, so about as many tokens. The last digit comes
    first: runs in a row share none."""
    return f"[{f'{number % MARKS:06d}'[::-1]}] "


def _with_recorded_lengths(tokenizer: Any, job: Job) -> Job:
    lengths = tuple(max(1, len(encode(tokenizer, call.answer))) for call in job.calls)
    return replace(job, lengths=lengths)

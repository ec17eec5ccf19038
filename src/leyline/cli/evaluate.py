"""`leyline eval`"""

from __future__ import annotations

import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import Progress

from leyline.cli.common import (
    ApiKey,
    ServedModel,
    err,
    fail,
    for_people,
    out,
    progress,
    without_folder,
)

if TYPE_CHECKING:
    from leyline.evals.arms import Arm, Key
    from leyline.evals.report import Results

app = typer.Typer(help="Agents that solve tasks, with and without edits.", no_args_is_help=True)


@app.callback()
def _evaluations() -> None:
    """Keeps `debug-gym` a command of its own."""


@app.command("debug-gym")
def debug_gym(
    endpoint: Annotated[str, typer.Option(metavar="URL", help="The server, with or without /v1.")],
    folder: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Episodes and report; goes on if there.")
    ],
    model: ServedModel = None,
    api_key: ApiKey = None,
    arms: Annotated[
        str, typer.Option(metavar="NAME,…", help="append, truncate, splice.")
    ] = "append,truncate,splice",
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Else the nine that need no network; or: all."),
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", "-n", min=1, help="Runs of each task, seeds 0, 1, …")
    ] = 1,
    steps: Annotated[int, typer.Option(min=2, help="debug-gym's max_steps: one call fewer.")] = 50,
    keep: Annotated[int, typer.Option(min=0, help="Tool outputs kept, newest first.")] = 2,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Else the server's default.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Else the server's default.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of an answer; else the server's default.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, help="Episodes at once.")
    ] = 1,
    scripted: Annotated[
        bool, typer.Option("--scripted", help="Answers that no model gave: does the loop work?")
    ] = False,
    allow_shell: Annotated[
        bool, typer.Option("--allow-shell", help="Let the model's commands run as this user.")
    ] = False,
    sandbox: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Run debug-gym inside it, e.g. 'unshare -rn'."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Tasks, instead of the package's.")
    ] = None,
    python: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of debug-gym's environment.")
    ] = None,
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds for an episode.")] = 3600,
) -> None:
    """debug-gym's mini_nightmare: does an agent solve more when old tool outputs go?"""
    with for_people():
        from leyline.evals.episode import Settings
        from leyline.evals.gym import Gym, find_python
        from leyline.evals.run import Options, check, evaluate
        from leyline.evals.store import Store
        from leyline.plot import require

        if not (scripted or allow_shell or sandbox):
            fail(
                "a model's commands would run in a shell as this user, with all that it may do; "
                "say --allow-shell (in a container, say), or give a --sandbox to run in"
            )
        options = Options(_tasks(tasks), seeds, _arms(arms), concurrency)
        settings = Settings(
            model=model or "",
            steps=steps,
            keep=keep,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            scripted=scripted,
            data=None if data is None else str(data.absolute()),
            time_limit=time_limit,
        )
        check(options, settings)
        if data is not None and not data.is_dir():
            fail(f"--data: {data} is no folder")
        require()
        with (
            _ended_in_order(),
            Gym(find_python(python), shlex.split(sandbox or "")) as gym,
            progress() as bars,
        ):
            on_start, on_episode = _bars(bars)
            results = evaluate(
                endpoint,
                options,
                settings,
                Store(folder),
                gym,
                key=api_key,
                on_start=on_start,
                on_episode=on_episode,
            )
        _finish(results, folder)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Told to end (SIGTERM), take along what was started, as for Ctrl-C."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        sys.exit(143)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _arms(text: str) -> tuple[Arm, ...]:
    from leyline.evals.arms import ARMS

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ARMS:
            fail(f"--arms: no arm {name!r}; there are {', '.join(ARMS)}")
    return tuple(arm for arm in ARMS if arm in names)


def _tasks(text: str | None) -> tuple[str, ...]:
    from leyline.evals.gym import OFFLINE, TASKS

    if text is None:
        return OFFLINE
    names = [name.strip() for name in text.split(",")]
    return TASKS if names == ["all"] else tuple(dict.fromkeys(names))


def _bars(bars: Progress) -> tuple[Callable[[int, int], None], Callable[[Key], None]]:
    """A progress bar over the episodes."""
    task = bars.add_task("episodes", total=None)

    from leyline.evals.report import counted

    def on_start(done: int, asked: int) -> None:
        bars.update(task, completed=done, total=asked)
        if not bars.console.is_terminal:
            bars.console.print(f"{counted(asked, 'episode')}, {done} of them finished already")

    def on_episode(key: Key) -> None:
        bars.advance(task)
        bars.update(task, description=f"{key.arm} {key.task} {key.seed}")
        if not bars.console.is_terminal:
            bars.console.print(f"{key.arm} {key.task} {key.seed}")

    return on_start, on_episode


def without_key(words: Sequence[str]) -> str:
    """The command line for a page: of folders their names; of the key, and of a name and password
    in an address, nothing."""
    shown: list[str] = []
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if shown and shown[-1] == "--api-key":
            shown.append("…")
        elif equals and option == "--api-key":
            shown.append("--api-key=…")
        else:
            value = re.sub(r"://.*@", "://", without_folder(value))
            shown.append(f"{option}{equals}{value}")
    return shlex.join(["leyline", *shown])


def _finish(results: Results, folder: Path) -> None:
    """Show and write. Exit code 1 where not all episodes came to their end."""
    from leyline.bench.bed import machine
    from leyline.evals.plots import draw
    from leyline.evals.report import counted, save

    results = replace(results, machine=machine(), command=without_key(sys.argv[1:]))
    out.print(f"[bold]{escape(results.title())}[/bold]", highlight=False)
    results.show(out)
    for file in save(results, folder, "report", draw):
        out.print(str(file), highlight=False)
    if len(results.episodes) < results.asked:
        left = results.asked - len(results.episodes)
        what = f"{counted(left, 'episode')} {'is' if left == 1 else 'are'} not finished"
        err.print(f"leyline: {what}; run it again", highlight=False)
        raise typer.Exit(1)

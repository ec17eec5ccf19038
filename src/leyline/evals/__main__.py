"""python -m leyline.evals: debug-gym with scripted answers, on a server of Leyline's own.

For machines on which no model fits that could solve the tasks: what the three arms compute, and
how long they wait, with the messages that debug-gym really sends.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from leyline.bench.bed import machine
from leyline.bench.served import Served, free_port
from leyline.evals.episode import Settings
from leyline.evals.gym import OFFLINE, Gym, find_python
from leyline.evals.plots import draw
from leyline.evals.report import Results, save
from leyline.evals.run import Options, evaluate
from leyline.evals.store import Store
from leyline.models import MissingExtra

out = Console()


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    given = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server ends with this process
    try:
        results = measured(given.model, tuple(given.tasks), given.episodes, given.python)
        shown = [Path(word).name if Path(word).is_absolute() else word for word in words]
        command = shlex.join(["python", "-m", "leyline.evals", *shown])
        results = replace(results, machine=machine(), command=command)
        if len(results.episodes) < results.asked:
            raise RuntimeError(f"not all episodes came to their end: {results.errors}")
        for file in save(results, given.out, "debug-gym", draw):
            out.print(str(file), highlight=False)
    except (MissingExtra, OSError, ValueError, RuntimeError) as trouble:
        sys.exit(f"leyline.evals: {trouble}")
    except KeyboardInterrupt:
        out.print("interrupted")
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m leyline.evals", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, nano or a model directory")
    parser.add_argument("--tasks", nargs="+", default=OFFLINE, choices=OFFLINE, metavar="NAME")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="results go there")
    parser.add_argument("--episodes", type=Path, metavar="DIR", help="keep records; goes on there")
    parser.add_argument("--python", type=Path, metavar="FILE", help="of debug-gym's environment")
    return parser


def measured(
    model: str, tasks: tuple[str, ...], episodes: Path | None = None, python: Path | None = None
) -> Results:
    """All arms on the tasks, one episode after the other. Raises ValueError, RuntimeError."""
    port = free_port()
    command = str(Path(sys.executable).with_name("leyline"))
    line = [command, "serve", model, "--port", str(port)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Gym(find_python(python)) as gym,
        Served(line, port),
    ):
        return evaluate(
            f"http://127.0.0.1:{port}",
            Options(tasks),
            Settings(model="", scripted=True),
            Store(episodes or Path(folder)),
            gym,
            on_episode=lambda key: out.print(f"{key.arm} {key.task}", highlight=False),
        )


if __name__ == "__main__":
    main()

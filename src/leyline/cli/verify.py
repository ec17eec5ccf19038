"""`leyline verify`"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from leyline.cli.common import (
    SMOLLM2,
    check_writable,
    chosen,
    err,
    for_people,
    loading,
    model_path,
    out,
    stages,
    without_folder,
    write_json,
)

if TYPE_CHECKING:
    from leyline.verify.run import Verified


def verify(
    model: Annotated[
        str, typer.Argument(help="A model directory, smollm2, nano, or a tiny random model.")
    ] = SMOLLM2,
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write a report with plots there.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="One measurement; repeatable.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: to see that it works.")
    ] = False,
    sessions: Annotated[
        int, typer.Option(min=1, max=12, help="Recorded sessions to weigh answers on.")
    ] = 3,
    calls: Annotated[
        int | None, typer.Option(min=4, help="At most so many calls of each of them.")
    ] = None,
    memory: Annotated[float, typer.Option(help="GiB for cached rows.")] = 2.0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Does the mechanism hold on a model? Rows, drift, influence, answers, forgetting."""
    with for_people():
        from leyline.verify.run import MEASUREMENTS, Options, run
        from leyline.verify.subject import is_tiny, load

        names = chosen(only, MEASUREMENTS)
        check_writable(json_file)
        if folder is not None:
            from leyline.plot import require

            require()
            folder.mkdir(parents=True, exist_ok=True)
            check_writable(folder / "report.md")
        with err.status(f"Loading {escape(model)} …"), loading(model):
            source = model if is_tiny(model) else model_path(model)[0]
            name = model if is_tiny(model) else model_path(model)[1]
            subject = load(name, source, memory, dtype)
        with subject.engine, stages(names) as say:
            found = run(subject, Options(tuple(names), quick, sessions, calls), say)
        _show(found)
        if json_file is not None:
            write_json(json_file, found.as_json())
        if folder is not None:
            from leyline.verify.report import write

            line = shlex.join(["leyline", *map(without_folder, sys.argv[1:])])
            out.print(f"Report: {write(found.as_json(), folder, line)}", highlight=False)
        if not found.checked:
            err.print("Nothing that could fail was measured.", highlight=False)
        if not found.passed:
            raise typer.Exit(1)


def _show(found: Verified) -> None:
    facts = found.facts
    layers = ", ".join(f"{count} {kind}" for kind, count in facts["layers"].items())
    out.print(
        f"{escape(found.results.model)}: {facts['model_type']}, {layers} layers, "
        f"{facts['rotary_width']} of {facts['key_columns']} key columns rotate "
        f"({facts['pairing']}, {facts['frequencies']}), {facts['dtype']}",
        highlight=False,
    )
    found.results.show(out, f"{sum(found.seconds.values()):.0f} s")
    for name, why in found.skipped.items():
        out.print(f"Left out: {name}: {why}.", highlight=False)
    for name, why in found.failed.items():
        out.print(f"Came to nothing: {name}: {why}.", highlight=False, markup=False)

"""The command line: one module a command."""

from __future__ import annotations

import sys
from typing import Annotated

from leyline import __version__
from leyline.models import MissingExtra

try:
    import typer

    from leyline.cli.bench import bench
    from leyline.cli.common import out
    from leyline.cli.demo import demo
    from leyline.cli.evaluate import app as evaluate
    from leyline.cli.inspect import inspect
    from leyline.cli.models import models
    from leyline.cli.replay import replay
    from leyline.cli.serve import serve
    from leyline.cli.traces import app as traces
    from leyline.cli.verify import verify
except ImportError as missing:  # a line, not a traceback
    sys.exit(f"leyline: {MissingExtra(missing.name or 'typer', 'server')}")

app = typer.Typer(
    name="leyline",
    help="Edit the context of a running LLM conversation without a re-prefill.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (serve, demo, bench, replay, inspect, models, verify):
    app.command()(command)
app.add_typer(evaluate, name="eval")
app.add_typer(traces, name="traces")


def main() -> None:
    """Entry point of the `leyline` command."""
    app()


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        out.print(f"leyline {__version__}", highlight=False)
        raise typer.Exit

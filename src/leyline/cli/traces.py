"""`leyline traces`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leyline.cli.common import check_writable, for_people, out

app = typer.Typer(help="Recorded sessions for `leyline replay`.", no_args_is_help=True)


@app.callback()
def _traces() -> None:
    """Keeps `convert` a command of its own."""


@app.command()
def convert(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="JSON lines; see docs/replay.md.")],
    file: Annotated[Path, typer.Argument(metavar="OUT", help="A .jsonl or .jsonl.gz file.")],
) -> None:
    """Make traces of a log of OpenAI requests and responses, or of transcripts."""
    with for_people():
        from leyline.replay.convert import convert as converted
        from leyline.traces import calls, save_traces

        check_writable(file)
        sessions = converted(log)
        save_traces(file, sessions)
        n = sum(len(list(calls(session))) for session in sessions)
        out.print(f"{file}: {len(sessions)} sessions, {n} calls", highlight=False)

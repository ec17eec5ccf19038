"""A replay's numbers as JSON, as Markdown, and as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from leyline import __version__
from leyline.replay.arms import ARMS
from leyline.replay.loop import Run
from leyline.replay.numbers import Comparison, Line, Times
from leyline.replay.server import Server
from leyline.replay.tables import markdown, share, table

SHOWN_ERRORS = 5
APART = 0.01
"""Share by which a tokenizer's count of a prompt may differ from the server's."""

_COLUMNS = (
    "at once",
    "arm",
    "cached",
    "ceiling",
    "computed",
    "first token p50",
    "p95",
    "end to end p50",
    "p95",
    "calls",
)
_COMPARED = (
    "at once",
    "arm",
    "beside",
    "hit rate",
    "computed",
    "first tokens waited for",
    "end to end",
    "edited calls",
    "their end to end",
    "the others'",
    "same first token",
)


@dataclass(frozen=True, slots=True)
class Results:
    """All of a replay. settings: what was asked for. cut_short: what ended it before all runs were
    made. machine: where the client ran."""

    server: Server
    settings: dict[str, Any]
    runs: tuple[Run, ...]
    lines: tuple[Line, ...]
    comparisons: tuple[Comparison, ...]
    errors: dict[str, int] = field(default_factory=dict)
    cut_short: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def answered(self) -> int:
        return sum(line.answered for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        compared = [
            {**asdict(comparison), "agreement": comparison.agreement}
            for comparison in self.comparisons
        ]
        return {
            "leyline": __version__,
            "server": self.server.as_json(),
            "client_machine": self.machine,
            "settings": self.settings,
            "lines": [asdict(line) for line in self.lines],
            "comparisons": compared,
            "errors": self.errors,
            "cut_short": self.cut_short,
            "notes": self.notes(),
            "runs": [asdict(run) for run in self.runs],
        }

    def notes(self) -> list[str]:
        """What a reader must know beside the numbers, a sentence each."""
        return [*_about_the_server(self), *_about_calls(self), *_about_ceilings(self.lines)]

    def markdown(self) -> str:
        """The report as a page of its own."""
        arms = dict.fromkeys(line.arm for line in self.lines)
        parts = [
            f"# Replay: {self.server.model} on {self.server.kind}",
            _described(self.settings),
            "\n".join(f"- `{arm}`: {ARMS[arm]}" for arm in arms),
            "## Arms",
            markdown(_COLUMNS, [_cells(line) for line in self.lines]),
            "## Compared",
            "Each arm as a share of the other, over the calls that all arms answered. Calls that "
            "nothing is edited in yet are the same in both arms: a share of their time other than "
            "100 % is the machine's. First tokens are those of edited calls.",
            markdown(_COMPARED, [_compared(each) for each in self.comparisons]),
        ]
        if notes := self.notes():
            parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
        if self.errors:
            shown = [f"- {n} × {text}" for text, n in self.errors.items()]
            parts += ["## Errors", "\n".join(shown)]
        return "\n\n".join(parts) + "\n"

    def show(self, out: Console) -> None:
        """Print tables, notes and the first errors."""
        out.print(_described(self.settings), highlight=False, markup=False)
        out.print(table(_COLUMNS, [_cells(line) for line in self.lines]))
        if self.comparisons:
            out.print("\nCompared, each arm as a share of the other:")
            out.print(table(_COMPARED, [_compared(each) for each in self.comparisons]))
        for note in self.notes():
            out.print(f"- {note}", highlight=False, markup=False)
        for text, n in list(self.errors.items())[:SHOWN_ERRORS]:
            out.print(f"error, {n} ×: {text}", highlight=False, markup=False)


def _described(settings: dict[str, Any]) -> str:
    gaps = "kept" if settings["gaps"] else "dropped"
    copies = settings["copies"]
    some = any(copies) if isinstance(copies, list) else copies
    which = f", {_listed(copies)} of them copies with first words of their own" if some else ""
    skipped = f", without the first {settings['skip']} of each" if settings["skip"] else ""
    return (
        f"{_listed(settings['calls'])} calls of {_listed(settings['sessions'])} recorded sessions"
        f"{which}{skipped}; tokens generated for each: {settings['answer']}, thrown away for the "
        f"recorded answer; the newest {settings['keep']} tool outputs stay; tool gaps {gaps}."
    )


def _listed(number: int | list[int]) -> str:
    """A setting that can be another one in each of several replays on one page."""
    return ", ".join(map(str, number)) if isinstance(number, list) else str(number)


def _about_the_server(results: Results) -> list[str]:
    notes = []
    if any(line.hit_rate is None and line.compared for line in results.lines):
        notes.append(
            "The server doesn't say how many prompt tokens it had cached, so there is no hit rate "
            "for some arms. SGLang says so with --enable-cache-report, vLLM with "
            "--enable-prompt-tokens-details."
        )
    if results.server.flush is None:
        notes.append(
            "The server's cache can't be emptied, so every run's prompts begin with a number of "
            "its own. First tokens are those of prompts that differ in it."
        )
    else:
        notes.append(f"The cache was emptied before every run, with {results.server.flush}.")
    return notes


def _about_calls(results: Results) -> list[str]:
    notes = []
    if results.cut_short is not None:
        notes.append(f"Not all runs were made. What ended it: {results.cut_short}.")
    for line in results.lines:
        if line.compared < line.calls:
            notes.append(
                f"{line.arm} at {line.concurrency}: of {line.calls} calls {line.left_out} were "
                f"left out as too long, {line.errors} failed; {line.compared} were answered in all "
                "arms."
            )
        if line.fallbacks:
            words = ", ".join(f"{n} × {reason}" for reason, n in line.fallbacks.items())
            notes.append(f"{line.arm} at {line.concurrency}: less was spliced than asked: {words}.")
    sessions = results.settings["sessions"]
    many = isinstance(sessions, int) and any(line.concurrency > sessions for line in results.lines)
    if many:
        notes.append(f"There are {sessions} sessions, so no more than these ran at once.")
    return notes


def _about_ceilings(lines: Sequence[Line]) -> list[str]:
    for line in lines:
        theirs, ours = line.prompt, line.ceiling_prompt
        if ours and theirs and abs(ours - theirs) > APART * theirs:
            return [
                f"The tokenizer makes {ours:,} tokens of prompts ({line.arm}) that the server "
                f"counts {theirs:,} tokens in: ceilings are another model's."
            ]
    return []


def _cells(line: Line) -> list[str]:
    return [
        str(line.concurrency),
        line.arm,
        share(line.hit_rate),
        share(line.ceiling),
        "" if line.computed is None else f"{line.computed:,}",
        *_times(line.ttft),
        *_times(line.e2e),
        f"{line.compared} of {line.calls}",
    ]


def _compared(each: Comparison) -> list[str]:
    known = ""
    if each.agreement is not None:
        known = f"{each.agreement:.1%} of {each.known} ({each.different} different)"
    if each.clear:
        known += f"; clear ones {each.same_clear / each.clear:.1%} of {each.clear}"
    return [
        str(each.concurrency),
        each.arm,
        each.beside,
        "" if each.points is None else f"{each.points:+.1f} points",
        share(each.computed),
        share(each.ttft),
        share(each.e2e),
        str(each.edited),
        share(each.e2e_edited),
        share(each.e2e_alike),
        known,
    ]


def _times(times: Times | None) -> tuple[str, str]:
    return (f"{times.p50:.3f} s", f"{times.p95:.3f} s") if times else ("", "")

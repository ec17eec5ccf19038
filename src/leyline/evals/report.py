"""An evaluation as JSON, as Markdown, and as tables in a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from leyline import __version__
from leyline.evals.arms import ARMS
from leyline.evals.numbers import Comparison, Line, by_task, comparisons_of, lines_of
from leyline.evals.store import Episode
from leyline.replay.tables import markdown, share, table

PAPER = "The paper: 31.2 % without truncation, 45.5 % with it through Leyline (JoyAI-LLM Flash)."

_SOLVED = ("arm", "solved", "rate", "95 %", "turns", "in the model", "in all")
_TOKENS = ("arm", "prompt", "cached", "computed", "computed a turn", "generated")
_PAIRED = ("arm", "beside", "pairs", "only this", "only the other", "difference", "95 %", "p")
_COSTS = ("arm", "beside", "computed", "a turn", "in the model", "a turn")


@dataclass(frozen=True, slots=True)
class Results:
    """All of an evaluation. server: what it runs on. settings: what all episodes share. asked: of
    episodes, now or before. errors: what kept an episode from its end, by episode. cut_short: why
    not all were tried."""

    server: dict[str, Any]
    settings: dict[str, Any]
    asked: int
    episodes: tuple[Episode, ...]
    errors: dict[str, str] = field(default_factory=dict)
    cut_short: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    command: str = ""

    @property
    def lines(self) -> list[Line]:
        return lines_of(self.episodes)

    @property
    def comparisons(self) -> list[Comparison]:
        return comparisons_of(self.episodes)

    def as_json(self) -> dict[str, Any]:
        return {
            "leyline": __version__,
            "command": self.command,
            "server": self.server,
            "client_machine": self.machine,
            "settings": self.settings,
            "asked": self.asked,
            "lines": [asdict(line) for line in self.lines],
            "comparisons": [asdict(each) for each in self.comparisons],
            "by_task": by_task(self.episodes),
            "errors": self.errors,
            "cut_short": self.cut_short,
            "notes": self.notes(),
            "episodes": [asdict(each) for each in self.episodes],
        }

    def notes(self) -> list[str]:
        """What a reader must know beside the numbers, a sentence each."""
        return [*_about_answers(self), *_about_episodes(self), *_about_counts(self)]

    def title(self) -> str:
        return f"debug-gym mini_nightmare: {self.settings['model']} on {self.server['kind']}"

    def markdown(self) -> str:
        """The report as a page of its own."""
        parts = [f"# {self.title()}"]
        if self.command:
            parts.append(f"Made by `{self.command}`{_where(self.machine)}.")
        parts += [
            _described(self),
            "\n".join(f"- `{line.arm}`: {ARMS[line.arm]}" for line in self.lines),
            "## Arms",
            markdown(_SOLVED, [_solved(line) for line in self.lines]),
            "Tokens, over all episodes:",
            markdown(_TOKENS, [_tokens(line) for line in self.lines]),
        ]
        if self.comparisons:
            parts += [
                "## Compared",
                "Over the tasks and seeds that both arms finished. Which of the two solved it:",
                markdown(_PAIRED, [_paired(each) for each in self.comparisons]),
                "Prompt tokens computed, and seconds in the model, as a share of the other arm's:",
                markdown(_COSTS, [_costs(each) for each in self.comparisons]),
            ]
        parts += ["## By task", _tasks(self)]
        parts += ["## Notes", "\n".join(f"- {note}" for note in self.notes())]
        if self.errors:
            shown = [f"- {name}: {text}" for name, text in self.errors.items()]
            parts += ["## Errors", "\n".join(shown)]
        return "\n\n".join(parts) + "\n"

    def page(self, picture: str) -> str:
        """The same with a picture, a file beside it."""
        title, _, rest = self.markdown().partition("\n\n")
        return f"{title}\n\n![The same as a picture]({picture})\n\n{rest}"

    def show(self, out: Console) -> None:
        """Print tables, notes and errors."""
        out.print(_described(self), highlight=False, markup=False)
        out.print(table(_SOLVED, [_solved(line) for line in self.lines]))
        out.print(table(_TOKENS, [_tokens(line) for line in self.lines]))
        if self.comparisons:
            out.print("\nCompared, over the same tasks and seeds: what was solved, what it cost:")
            out.print(table(_PAIRED, [_paired(each) for each in self.comparisons]))
            out.print(table(_COSTS, [_costs(each) for each in self.comparisons]))
        for note in self.notes():
            out.print(f"- {note}", highlight=False, markup=False)
        for name, text in self.errors.items():
            out.print(f"error: {name}: {text}", highlight=False, markup=False)


def save(
    results: Results,
    folder: Path,
    name: str,
    draw: Callable[[Sequence[Line], str, Path], None],
) -> list[Path]:
    """Write NAME.md, NAME.json and, where an episode is finished, NAME.png; returns their paths.
    Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    page, numbers, picture = (folder / f"{name}.{kind}" for kind in ("md", "json", "png"))
    text = results.page(picture.name) if results.lines else results.markdown()
    page.write_text(text, encoding="utf-8")
    numbers.write_text(json.dumps(results.as_json(), indent=2) + "\n", encoding="utf-8")
    if not results.lines:
        return [page, numbers]
    draw(results.lines, results.title(), picture)
    return [page, numbers, picture]


def counted(n: int, what: str) -> str:
    """A number of things: "1 task", "2 tasks"."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _described(results: Results) -> str:
    settings = results.settings
    tasks = len({each.task for each in results.episodes})
    seeds = len({each.seed for each in results.episodes})
    who = "scripted answers" if settings["scripted"] else f"answers of {settings['model']}"
    return (
        f"{len(results.episodes)} of {counted(results.asked, 'episode')} "
        f"({counted(tasks, 'task')}, {counted(seeds, 'seed')}), {who}, up to "
        f"{counted(settings['steps'] - 1, 'call')} each. Where old tool outputs are cleared, the "
        f"newest {settings['keep']} {'stays' if settings['keep'] == 1 else 'stay'}."
    )


def _where(machine: dict[str, Any]) -> str:
    if not machine:
        return ""
    load = machine.get("load")
    busy = "" if load is None else f", load {load:.1f}"
    return f" on {machine['cores']} cores ({machine['cpu']}){busy}"


def _about_answers(results: Results) -> list[str]:
    if results.settings["scripted"]:
        return [
            "Answers were scripted: the server prefilled every prompt and its answer was replaced. "
            "Solve rates say that the loop works, nothing of a model. What tools print has times "
            "and folder names in it, so prompts of two arms differ by a few tokens.",
        ]
    notes = [PAPER]
    if results.settings["temperature"] == 0 and len({e.seed for e in results.episodes}) > 1:
        notes.append("Temperature 0: seeds of one task and arm are the same episode over again.")
    return notes


def _about_episodes(results: Results) -> list[str]:
    notes = [
        "The rate's interval (Wilson) takes episodes for independent; that of a difference draws "
        "tasks, with all their seeds. p is McNemar's, exact.",
        "Tokens and seconds are sums over episodes. "
        "Every prompt begins with a number of its episode's own: episodes share nothing in the "
        "server's cache.",
    ]
    if results.cut_short is not None:
        notes.append(f"Not all episodes were tried. What ended it: {results.cut_short}.")
    if results.errors:
        failed = counted(len(results.errors), "episode")
        notes.append(f"{failed} came to no end; run it again for what is missing.")
    for line in results.lines:
        reasons = ", ".join(f"{n} × {reason}" for reason, n in line.reasons.items())
        notes.append(f"{line.arm} ended by: {reasons}.")
    digests: dict[str, set[str]] = {}
    for each in results.episodes:
        digests.setdefault(each.task, set()).add(each.digest)
    mixed = [task for task, found in digests.items() if len(found) > 1]
    if mixed:
        notes.append(f"Not all episodes had the same files: {', '.join(mixed)}.")
    return [*notes, *_about_circumstances(results.episodes)]


def _about_circumstances(episodes: Sequence[Episode]) -> list[str]:
    """What differs between episodes that were run at different times."""
    notes = []
    beside = {each.concurrency for each in episodes}
    if len(beside) > 1:
        at = ", ".join(_or_unknown(n) for n in sorted(beside, key=lambda n: n or 0))
        notes.append(
            f"Not all episodes ran beside as many others ({at} at once): their seconds are not to "
            "be compared."
        )
    for name in ("leyline", "debug_gym", "python"):
        found = {each.versions.get(name) for each in episodes}
        if len(found) > 1:
            which = ", ".join(_or_unknown(it) for it in sorted(found, key=lambda it: it or ""))
            notes.append(f"Not all episodes ran with the same {name}: {which}.")
    return notes


def _or_unknown(what: object) -> str:
    return "unknown" if what is None else str(what)


def _about_counts(results: Results) -> list[str]:
    notes = []
    if any(line.cached is None for line in results.lines):
        notes.append(
            "The server doesn't say how many prompt tokens it had cached. SGLang does with "
            "--enable-cache-report, vLLM with --enable-prompt-tokens-details."
        )
    for line in results.lines:
        if line.fallbacks:
            words = ", ".join(f"{n} × {reason}" for reason, n in line.fallbacks.items())
            notes.append(f"{line.arm}: less was spliced than asked: {words}.")
    return notes


def _solved(line: Line) -> list[str]:
    return [
        line.arm,
        f"{line.solved} of {line.episodes}",
        share(line.rate),
        _between(line.interval),
        f"{line.turns:,}",
        f"{line.model_s:,.1f} s",
        f"{line.wall_s:,.1f} s",
    ]


def _tokens(line: Line) -> list[str]:
    each = None if line.computed is None or not line.turns else round(line.computed / line.turns)
    return [
        line.arm,
        f"{line.prompt:,}",
        *("" if count is None else f"{count:,}" for count in (line.cached, line.computed, each)),
        f"{line.completion:,}",
    ]


def _paired(each: Comparison) -> list[str]:
    low_high = each.interval
    return [
        each.arm,
        each.beside,
        str(each.pairs),
        str(each.only_arm),
        str(each.only_beside),
        "" if each.difference is None else f"{100 * each.difference:+.1f} points",
        "" if low_high is None else f"{100 * low_high[0]:+.1f} … {100 * low_high[1]:+.1f}",
        f"{each.p:.3f}",
    ]


def _costs(each: Comparison) -> list[str]:
    shares = (each.computed, each.computed_each_turn, each.model_s, each.model_s_each_turn)
    return [each.arm, each.beside, *map(share, shares)]


def _tasks(results: Results) -> str:
    arms = [line.arm for line in results.lines]
    rows = []
    for task, row in by_task(results.episodes).items():
        cells = [f"{row[arm][0]} of {row[arm][1]}" if arm in row else "" for arm in arms]
        rows.append([task, *cells])
    return markdown(["task", *arms], rows)


def _between(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.1%} … {interval[1]:.1%}"

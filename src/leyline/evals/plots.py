"""An evaluation's picture: what was solved, what was computed, and how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leyline.evals.arms import Arm
from leyline.evals.numbers import Line
from leyline.plot import CACHED, INK, LEYLINE, MUTED, PREFIX, require, tidy

COLORS: dict[Arm, str] = {"append": "#8a94a6", "truncate": PREFIX, "splice": LEYLINE}


def draw(lines: Sequence[Line], title: str, file: Path) -> None:
    """Write a PNG. Raises MissingExtra, OSError."""
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=11.5, color=INK, weight="bold")
    solved, tokens, seconds = figure.subplots(1, 3)
    _rates(solved, lines)
    _tokens(tokens, lines)
    _seconds(seconds, lines)
    for axes in (solved, tokens, seconds):
        axes.set_xticks(range(len(lines)), [line.arm for line in lines])
        tidy(axes)
    figure.savefig(file, format="png")


def _rates(axes: Any, lines: Sequence[Line]) -> None:
    """Bars, with the interval as whiskers."""
    for x, line in enumerate(lines):
        axes.bar(x, line.rate or 0, width=0.6, color=COLORS[line.arm])
        if line.interval is not None:
            axes.plot([x, x], line.interval, color=INK, linewidth=1.4, marker="_")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _named(axes, "episodes solved, 95 % interval")


def _tokens(axes: Any, lines: Sequence[Line]) -> None:
    """Of an episode's prompts: what was cached in grey, what was computed in the arm's colour."""
    counted = [(x, line) for x, line in enumerate(lines) if line.computed is not None]
    for x, line in counted:
        cached, computed = (line.cached or 0) / line.episodes, (line.computed or 0) / line.episodes
        axes.bar(x, cached, width=0.6, color=CACHED)
        axes.bar(x, computed, width=0.6, bottom=cached, color=COLORS[line.arm])
        axes.annotate(
            f"{computed:,.0f} computed",
            (x, cached + computed),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            size=8.5,
            color=INK,
        )
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _named(axes, "prompt tokens an episode, cached in grey")


def _seconds(axes: Any, lines: Sequence[Line]) -> None:
    for x, line in enumerate(lines):
        axes.bar(x, line.model_s / line.episodes, width=0.6, color=COLORS[line.arm])
    axes.set_ylim(bottom=0)
    _named(axes, "seconds in the model, an episode")


def _named(axes: Any, what: str) -> None:
    axes.set_title(what, loc="left", size=9.5, color=MUTED)

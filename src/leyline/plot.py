"""The demo's picture: what each call cost, in both arms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from leyline.models import MissingExtra
from leyline.replay import ArmResult

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
CACHED, PREFIX, LEYLINE = "#d3dae6", "#d9623b", "#1f77a4"


def require() -> None:
    """Raises MissingExtra where there is nothing to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtra("matplotlib", "plot") from error


def draw(prefix: ArmResult, leyline: ArmResult, title: str, path: Path) -> None:
    """Write a PNG. Raises OSError where the file can't be written."""
    require()
    from matplotlib.figure import Figure

    with_font = {"family": "DejaVu Sans", "color": INK}
    figure = Figure(figsize=(11, 7.4), dpi=150, facecolor="white")
    grid = figure.add_gridspec(
        2,
        2,
        height_ratios=(1.1, 1),
        hspace=0.36,
        wspace=0.07,
        left=0.075,
        right=0.97,
        top=0.82,
        bottom=0.085,
    )
    figure.text(
        0.075, 0.945, _headline(prefix, leyline), fontdict=with_font, size=16.5, weight="bold"
    )
    figure.text(0.075, 0.9, title, fontdict=with_font, size=10.5, color=MUTED)
    top = max(turn.prompt_tokens for turn in prefix.turns) * 1.22
    first = figure.add_subplot(grid[0, 0])
    second = figure.add_subplot(grid[0, 1], sharey=first)
    _bars(first, prefix, "Plain prefix cache", PREFIX, top)
    _bars(second, leyline, "Leyline", LEYLINE, top)
    first.set_ylabel("prompt tokens", color=MUTED)
    second.tick_params(labelleft=False)
    _waiting(figure.add_subplot(grid[1, :]), prefix, leyline)
    figure.savefig(path, format="png")


def _headline(prefix: ArmResult, leyline: ArmResult) -> str:
    tokens = prefix.computed_tokens / max(1, leyline.computed_tokens)
    waiting = prefix.ttft_s / max(1e-9, leyline.ttft_s)
    computes = f"Leyline computes {tokens:.1f}× fewer tokens"
    return f"{computes}, and waits {waiting:.1f}× less for first tokens"


def _bars(axes: Any, result: ArmResult, name: str, color: str, top: float) -> None:
    """Per call: cached tokens in grey, computed ones in the arm's colour on top."""
    calls = range(1, len(result.turns) + 1)
    cached = [turn.cached_tokens for turn in result.turns]
    computed = [turn.computed_tokens for turn in result.turns]
    axes.bar(
        calls, cached, width=0.82, color=CACHED, label=f"from the cache ({result.hit_rate:.0%})"
    )
    axes.bar(calls, computed, width=0.82, bottom=cached, color=color, label="computed")
    axes.set_ylim(0, top)
    axes.set_title(
        f"{name}: {result.computed_tokens:,} tokens computed",
        loc="left",
        size=11.5,
        color=INK,
        weight="bold",
        pad=9,
    )
    _tidy(axes, calls)
    axes.legend(frameon=False, loc="upper left", fontsize=9, labelcolor=MUTED, ncols=2)


def _waiting(axes: Any, prefix: ArmResult, leyline: ArmResult) -> None:
    """Seconds waited for first tokens, summed up call by call."""
    calls = range(1, len(prefix.turns) + 1)
    lines = {}
    for result, color in ((prefix, PREFIX), (leyline, LEYLINE)):
        total = list(accumulate(turn.ttft_s for turn in result.turns))
        axes.plot(calls, total, color=color, linewidth=2.4, marker="o", markersize=3.6)
        lines[result.arm] = total
    axes.fill_between(
        calls, lines["leyline"], lines["prefix"], color=PREFIX, alpha=0.08, linewidth=0
    )
    for result, name, color in (
        (prefix, "plain prefix cache", PREFIX),
        (leyline, "Leyline", LEYLINE),
    ):
        axes.annotate(
            f"{name}  {result.ttft_s:.1f} s",
            (len(calls), lines[result.arm][-1]),
            xytext=(-8, 7),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=color,
            weight="bold",
            size=10.5,
        )
    axes.set_ylim(0, max(prefix.ttft_s, leyline.ttft_s) * 1.15)
    axes.set_title(
        "Waiting for the first token, summed over the calls (seconds)",
        loc="left",
        size=11.5,
        color=INK,
        weight="bold",
        pad=9,
    )
    axes.set_xlabel("model call", color=MUTED)
    _tidy(axes, calls)


def tidy(axes: Any, left: bool = False, grid: str = "y") -> None:
    """The look of all plots. left: with a line on the left; grid: of which axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines["left"].set_visible(left)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, labelsize=9)


def _tidy(axes: Any, calls: Sequence[int]) -> None:
    tidy(axes)
    axes.set_xlim(0.3, len(calls) + 0.7)
    step = max(1, len(calls) // 10)
    axes.set_xticks([n for n in calls if n == 1 or n % step == 0])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

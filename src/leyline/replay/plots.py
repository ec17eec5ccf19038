"""A replay's pictures: hit rates, and times to the first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leyline.plot import INK, LEYLINE, MUTED, PREFIX, require, tidy
from leyline.replay.arms import ARMS, Arm
from leyline.replay.numbers import Line

COLORS: dict[Arm, str] = {
    "append": "#8a94a6",
    "truncate": PREFIX,
    "splice": LEYLINE,
    "forget": "#7a5ea8",
}
WIDTH = 0.8
"""Of all bars of one concurrency."""


def draw(lines: Sequence[Line], title: str, folder: Path) -> list[Path]:
    """Write PNGs of what there is to show; returns their paths. Raises MissingExtra, OSError."""
    require()
    pictures: list[tuple[str, str, Callable[[Any, Sequence[Line]], None]]] = []
    if any(line.hit_rate is not None for line in lines):
        pictures.append(("hit_rate.png", "prompt tokens from the cache", _hit_rates))
    if any(line.ttft is not None for line in lines):
        pictures.append(("first_token.png", "seconds to the first token", _first_tokens))
    made = []
    for name, what, picture in pictures:
        _draw(lines, f"{title}: {what}", picture, folder / name)
        made.append(folder / name)
    return made


def _draw(
    lines: Sequence[Line], title: str, picture: Callable[[Any, Sequence[Line]], None], file: Path
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    picture(axes, lines)
    axes.set_title(title, loc="left", size=11, color=INK, weight="bold", pad=22)
    axes.set_xlabel("sessions at once", color=MUTED)
    tidy(axes)
    axes.legend(
        frameon=False,
        fontsize=9,
        labelcolor=MUTED,
        ncols=5,
        loc="lower left",
        bbox_to_anchor=(0, 1),
    )
    figure.savefig(file, format="png")


def _hit_rates(axes: Any, lines: Sequence[Line]) -> None:
    """Bars, with a stroke where the ceiling is."""
    places = _places(axes, lines)
    labelled = False
    for arm, at in places.items():
        rates = [(x, line.hit_rate) for x, line in at if line.hit_rate is not None]
        _bars(axes, rates, arm, len(places))
        for x, line in at:
            if line.ceiling is not None:
                half = 0.45 * WIDTH / len(places)
                label = None if labelled else "ceiling"
                axes.hlines(line.ceiling, x - half, x + half, color=INK, linewidth=1.6, label=label)
                labelled = True
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _first_tokens(axes: Any, lines: Sequence[Line]) -> None:
    """Medians as bars, the 95th percentiles as whiskers."""
    places = _places(axes, lines)
    for arm, at in places.items():
        timed = [(x, line.ttft) for x, line in at if line.ttft is not None]
        _bars(axes, [(x, ttft.p50) for x, ttft in timed], arm, len(places))
        for x, ttft in timed:
            axes.plot([x, x], [ttft.p50, ttft.p95], color=COLORS[arm], linewidth=1.4, marker="_")
    axes.set_ylim(bottom=0)


def _bars(axes: Any, at: Sequence[tuple[float, float]], arm: Arm, arms: int) -> None:
    if at:
        xs, heights = zip(*at, strict=True)
        axes.bar(xs, heights, width=0.9 * WIDTH / arms, color=COLORS[arm], label=arm, alpha=0.85)


def _places(axes: Any, lines: Sequence[Line]) -> dict[Arm, list[tuple[float, Line]]]:
    """Where each line's bar stands: a group for each concurrency, in it one for each arm."""
    groups = sorted({line.concurrency for line in lines})
    arms = [arm for arm in ARMS if any(line.arm == arm for line in lines)]
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    step = WIDTH / len(arms)
    return {
        arm: [
            (groups.index(line.concurrency) + (i - (len(arms) - 1) / 2) * step, line)
            for line in lines
            if line.arm == arm
        ]
        for i, arm in enumerate(arms)
    }

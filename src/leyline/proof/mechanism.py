"""The paper's mechanism table, here: the shortest recorded sessions against real SGLang on the CPU
with the plugin, with a plain prefix cache and with splices, so many sessions at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from leyline.bench.bed import machine
from leyline.replay.arms import Arm
from leyline.replay.report import Results
from leyline.replay.run import Options, replay_on
from leyline.traces import load_traces, shortest, take


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is replayed. sessions: by how many are at once. calls: of each session the first.
    unedited: where the arm without edits runs too, which tells the full context's first tokens.
    slots: rows that the server holds, so many that nothing is evicted and arms differ by their
    edits alone."""

    sessions: dict[int, int]
    calls: int
    unedited: tuple[int, ...]
    slots: int


# As many sessions as are at once. SmolLM2's prompts take four times as long as nano's.
_SESSIONS = {1: 2, 4: 4, 8: 8, 16: 16}
FULL = {
    "nano": Scale(_SESSIONS, 6, (1, 4), 120_000),
    "smollm2": Scale(_SESSIONS, 4, (1,), 120_000),
}
AT_LEAST = 4
"""Sessions that are told apart; more at once are copies with first words of their own."""

QUICK = Scale({1: 1, 2: 2}, 4, (2,), 32_768)


def run(model: Path, scale: Scale, say: Callable[[str], None] = lambda text: None) -> Results:
    """model: a directory. The server ends with the run."""
    from transformers import AutoTokenizer

    from leyline.sglang.bench.server import Server

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    slots, name = ("--max-total-tokens", str(scale.slots)), ("--served-model-name", model.name)
    flags = (*slots, *name, "--enable-cache-report", "--page-size", "1")
    say("the server starts")
    with Server(model, flags) as server:

        def on_run(arm: str, concurrency: int, calls: int) -> Callable[[], None]:
            done = iter(range(1, calls + 1))
            return lambda: say(f"{concurrency} at once, {arm}: {next(done, calls)} of {calls}")

        parts = [
            replay_on(
                str(server.http.base_url),
                take(shortest(load_traces(), AT_LEAST), sessions),
                Options(_arms(scale, concurrency), (concurrency,), calls=scale.calls),
                tokenizer=tokenizer,
                on_run=on_run,
            )
            for concurrency, sessions in scale.sessions.items()
        ]
    return _together(parts)


def _arms(scale: Scale, concurrency: int) -> tuple[Arm, ...]:
    edited: tuple[Arm, ...] = ("truncate", "splice")
    return ("append", *edited) if concurrency in scale.unedited else edited


def _together(parts: list[Results]) -> Results:
    """One page of replays that differ in how many sessions are at once."""
    first = parts[0]
    settings = {
        "concurrency": [n for part in parts for n in part.settings["concurrency"]],
        "sessions": [part.settings["sessions"] for part in parts],
        "calls": [part.settings["calls"] for part in parts],
    }
    return replace(
        first,
        settings=first.settings | settings,
        runs=tuple(run for part in parts for run in part.runs),
        lines=tuple(line for part in parts for line in part.lines),
        comparisons=tuple(each for part in parts for each in part.comparisons),
        errors=dict(sum((Counter(part.errors) for part in parts), Counter())),
        cut_short=next((part.cut_short for part in parts if part.cut_short), None),
        machine=machine(),
    )


def save(results: Results, folder: Path, command: str) -> list[Path]:
    """Write results.json, report.md and pictures. Returns the first two."""
    from leyline.replay.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "results.json", folder / "report.md"
    data.write_text(json.dumps({"command": command, **results.as_json()}) + "\n", encoding="utf-8")
    page.write_text(f"{results.markdown()}\nMade by `{command}`.\n", encoding="utf-8")
    draw(results.lines, f"{results.server.model} on {results.server.kind}", folder)
    return [data, page]

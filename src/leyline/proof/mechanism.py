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
from leyline.traces import Session, calls, load_traces, take


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is replayed. sessions: by how many are at once. distinct: recorded ones among them,
    the others are copies. skip: calls of each session that are left out first. calls: so many
    behind them. unedited: where the arm without edits runs too, which tells the full context's
    first tokens. slots: rows that the server holds, so many that nothing is evicted and arms differ
    by their edits alone."""

    sessions: dict[int, int]
    distinct: int
    skip: int
    calls: int
    unedited: tuple[int, ...]
    slots: int


# The first two calls are left out: no output is old yet, so they are the same in all arms.
# SmolLM2's prompts take four times as long as nano's: the longest sessions are left to that one.
_SESSIONS = {1: 4, 4: 4, 8: 8, 16: 16}
FULL = {
    "nano": Scale(_SESSIONS, 12, 2, 6, (8,), 120_000),
    "smollm2": Scale(_SESSIONS, 8, 2, 3, (8,), 120_000),
}
QUICK = Scale({1: 1, 2: 2}, 2, 2, 2, (2,), 32_768)


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
                take(_chosen(scale), sessions),
                Options(
                    _arms(scale, concurrency), (concurrency,), calls=scale.calls, skip=scale.skip
                ),
                tokenizer=tokenizer,
                on_run=on_run,
            )
            for concurrency, sessions in scale.sessions.items()
        ]
    return _together(parts)


def _chosen(scale: Scale) -> list[Session]:
    """The recorded sessions that are long enough, those with the least text first."""

    def length(session: Session) -> int:
        *_, last = list(calls(session))[: scale.skip + scale.calls]
        return sum(len(message["content"]) for message in last.messages)

    recorded = load_traces()
    enough = [s for s in recorded if len(list(calls(s))) >= scale.skip + scale.calls]
    return sorted(enough, key=length)[: scale.distinct]


def _arms(scale: Scale, concurrency: int) -> tuple[Arm, ...]:
    edited: tuple[Arm, ...] = ("truncate", "splice")
    return ("append", *edited) if concurrency in scale.unedited else edited


def _together(parts: list[Results]) -> Results:
    """One page of replays that differ in how many sessions are at once."""
    first = parts[0]
    settings = {
        "concurrency": [n for part in parts for n in part.settings["concurrency"]],
        "sessions": [part.settings["sessions"] for part in parts],
        "copies": [part.settings["copies"] for part in parts],
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

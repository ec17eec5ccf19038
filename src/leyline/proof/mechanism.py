"""The paper's mechanism table, here: recorded sessions against real SGLang on the CPU with the
plugin, with a plain prefix cache and with splices, so many sessions at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from leyline.bench.bed import machine
from leyline.replay.report import Results
from leyline.replay.run import Options, replay_on
from leyline.traces import load_traces, take


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is replayed. calls: of each session the first. slots: rows that the server holds, so
    many that nothing is evicted and arms differ by their edits alone."""

    sessions: int
    calls: int
    concurrency: tuple[int, ...]
    slots: int


FULL = {
    "nano": Scale(16, 16, (1, 4, 8, 16), 300_000),
    "smollm2": Scale(4, 12, (1, 4), 40_000),
}
QUICK = Scale(2, 5, (1, 2), 32_768)


def run(model: Path, scale: Scale, say: Callable[[str], None] = lambda text: None) -> Results:
    """model: a directory. The server ends with the run."""
    from transformers import AutoTokenizer

    from leyline.sglang.bench.server import Server

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    options = Options(
        arms=("append", "truncate", "splice"), concurrency=scale.concurrency, calls=scale.calls
    )
    flags = ("--max-total-tokens", str(scale.slots), "--enable-cache-report", "--page-size", "1")
    say("the server starts")
    with Server(model, flags) as server:

        def on_run(arm: str, concurrency: int, calls: int) -> Callable[[], None]:
            done = iter(range(1, calls + 1))
            return lambda: say(f"{concurrency} at once, {arm}: {next(done, calls)} of {calls}")

        results = replay_on(
            str(server.http.base_url),
            take(load_traces(), scale.sessions),
            options,
            tokenizer=tokenizer,
            on_run=on_run,
        )
    return replace(results, machine=machine())


def save(results: Results, folder: Path, command: str) -> list[Path]:
    """Write results.json, report.md and pictures. Returns the first two."""
    from leyline.replay.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "results.json", folder / "report.md"
    data.write_text(json.dumps({"command": command, **results.as_json()}) + "\n", encoding="utf-8")
    page.write_text(f"{results.markdown()}\nMade by `{command}`.\n", encoding="utf-8")
    draw(results.lines, f"{results.server.model} on {results.server.kind}", folder)
    return [data, page]

"""All measurements, one after the other, on SmolLM2 or another model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from leyline.bench.bed import Bed, machine
from leyline.bench.results import Results
from leyline.bench.row import Row
from leyline.bench.splice import Sizes
from leyline.sglang.bench import ahead, edit, host, recorded, throughput
from leyline.sglang.bench.server import Server
from leyline.traces import load_traces

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """quick: fewer repetitions and smaller sizes, to see that all works; goals are for full
    runs."""

    model: Path
    only: tuple[str, ...] = ()
    quick: bool = False


def run(options: Options, say: Callable[[str, str], None] = lambda name, text: None) -> Results:
    """Run the chosen measurements, all by default. say: told the measurement and what it is at."""
    chosen = options.only or tuple(MEASUREMENTS)
    where = machine()
    where["versions"]["sglang"] = metadata.version("sglang")
    results = Results(options.model.name, options.quick, where)
    bed = Bed(options.model, repeats=1 if options.quick else 3)
    for name, measure in MEASUREMENTS.items():
        if name in chosen:
            say(name, "")
            results.rows += measure(bed, options, partial(say, name))
    return results


def _host(bed: Bed, options: Options, say: Say) -> list[Row]:
    return host.run(bed.path, 5 if options.quick else 100, say)


def _edit(bed: Bed, options: Options, say: Say) -> list[Row]:
    return _edited(edit.run, bed, options, say)


def _ahead(bed: Bed, options: Options, say: Say) -> list[Row]:
    return _edited(ahead.run, bed, options, say)


def _edited(measure: Callable[..., list[Row]], bed: Bed, options: Options, say: Say) -> list[Row]:
    sizes = Sizes(conversation=1200, span=300) if options.quick else Sizes()
    slots = ("--max-total-tokens", str(6 * sizes.conversation))
    say("the server starts")
    with Server(bed.path, slots, watched=True) as server:
        tokens = bed.tokens(sizes.conversation)
        return measure(server, tokens, sizes, bed.repeats, len(bed.tokenizer), say)


def _throughput(bed: Bed, options: Options, say: Say) -> list[Row]:
    load = throughput.Load(clients=4, prompt=32, new=4) if options.quick else throughput.Load()
    repeats = 1 if options.quick else 12
    slots = ("--max-total-tokens", "8192")
    say("the servers start")
    with Server(bed.path, slots) as ours, Server(bed.path, slots, plugin=False) as alone:
        return throughput.run(ours, alone, load, repeats, len(bed.tokenizer), say)


def _recorded(bed: Bed, options: Options, say: Say) -> list[Row]:
    sessions = load_traces()
    if options.quick:
        sessions = sorted(sessions, key=lambda session: len(session.messages))[:2]
    say("the server starts")
    with TemporaryDirectory(prefix="leyline-bench-") as folder:
        tiny = recorded.write_tiny(Path(folder), bed.tokenizer)
        with Server(tiny, recorded.FLAGS) as server:
            return recorded.run(server, bed.tokenizer, sessions, say=say)


MEASUREMENTS: dict[str, Callable[[Bed, Options, Say], list[Row]]] = {
    "host": _host,
    "edit": _edit,
    "ahead": _ahead,
    "throughput": _throughput,
    "recorded": _recorded,
}

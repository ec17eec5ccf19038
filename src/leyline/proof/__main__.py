"""python -m leyline.proof …: what a splice brings and costs, as JSON, pages and pictures."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from leyline.models import MissingExtra

out = Console()
err = Console(stderr=True)

Say = Callable[[str], None]


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    given = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with this process
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        for file in given.run(given, words):
            out.print(str(file), highlight=False)
    except (MissingExtra, OSError, ValueError, RuntimeError) as trouble:
        sys.exit(f"leyline.proof: {trouble}")
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m leyline.proof", description=__doc__)
    commands = parser.add_subparsers(required=True)
    measured = {
        "peers": (_peers, "one edit at llama.cpp, SGLang and Leyline"),
        "growth": (_growth, "splice and re-prefill as the context grows; rows alone"),
        "model": (_model, "a model on paper for large GPUs"),
    }
    for name, (run, what) in measured.items():
        each = commands.add_parser(name, help=what)
        each.set_defaults(run=run)
        each.add_argument("--out", type=Path, required=True, metavar="DIR", help="results go there")
        each.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
        if name != "model":
            each.add_argument("--model", type=Path, help="a model directory (default: SmolLM2)")
        if name == "peers":
            each.add_argument("--gguf", type=Path, help="its weights for llama.cpp")
            each.add_argument(
                "--only", action="append", metavar="NAME", help="one engine; repeatable"
            )
        if name == "model":
            each.add_argument(
                "--growth", type=Path, metavar="FILE", help="to check against (DIR/growth.json)"
            )
    mechanism = commands.add_parser("mechanism", help="recorded sessions against SGLang")
    mechanism.set_defaults(run=_mechanism)
    mechanism.add_argument("model", choices=["nano", "smollm2"])
    mechanism.add_argument("--out", type=Path, required=True, metavar="DIR")
    mechanism.add_argument("--quick", action="store_true")
    index = commands.add_parser("index", help="the paper's figures beside those in DIR")
    index.set_defaults(run=_index)
    index.add_argument("out", type=Path, metavar="DIR")
    page = commands.add_parser("page", help="make page and picture of a JSON file anew")
    page.set_defaults(run=_page)
    page.add_argument("file", type=Path)
    return parser


def _peers(given: argparse.Namespace, words: list[str]) -> list[Path]:
    from leyline.bench.bed import Bed
    from leyline.proof import peers
    from leyline.proof.engines import PEERS, Setting

    unknown = [name for name in given.only or () if name not in {peer.name for peer in PEERS}]
    if unknown:
        known = ", ".join(repr(peer.name) for peer in PEERS)
        raise ValueError(f"--only: no engine {unknown[0]!r}; there are {known}")
    chosen = [peer for peer in PEERS if not given.only or peer.name in given.only]
    missing = [peer.missing for peer in chosen if peer.missing]
    if missing:
        raise ValueError("; ".join(missing))
    gguf = given.gguf or (None if given.model else peers.gguf_of_smollm2())
    bed = Bed(_model_path(given.model), repeats=1)
    setting = Setting(bed.path, gguf, peers.needed_tokens(given.quick) + 100, _threads())

    def run(say: Say) -> dict[str, Any]:
        tokens = bed.tokens(peers.needed_tokens(given.quick))
        return peers.run(setting, bed.tokenizer, tokens, chosen, quick=given.quick, say=say)

    return _measured("peers", given, words, run)


def _growth(given: argparse.Namespace, words: list[str]) -> list[Path]:
    from leyline.proof import growth

    path = _model_path(given.model)
    return _measured(
        "growth", given, words, lambda say: growth.run(path, quick=given.quick, say=say)
    )


def _model(given: argparse.Namespace, words: list[str]) -> list[Path]:
    from leyline.proof import paper_table, report

    file = given.growth or given.out / "growth.json"
    if given.growth and not file.is_file():
        raise ValueError(f"--growth: {file} is no file")
    growth = report.load(file, "growth")["data"] if file.is_file() else None
    sizes = paper_table.SIZES[:2] if given.quick else paper_table.SIZES
    return _measured("model", given, words, lambda say: paper_table.run(growth, sizes))


def _mechanism(given: argparse.Namespace, words: list[str]) -> list[Path]:
    from leyline.models.nano import nano_path
    from leyline.proof import mechanism

    path = nano_path() if given.model == "nano" else _model_path(None)
    scale = mechanism.QUICK if given.quick else mechanism.FULL[given.model]
    with err.status("mechanism") as status:
        results = mechanism.run(path, scale, lambda text: status.update(f"mechanism: {text}"))
    folder = given.out / f"mechanism-{given.model}"
    return mechanism.save(results, folder, f"python -m leyline.proof {' '.join(words)}")


def _index(given: argparse.Namespace, words: list[str]) -> list[Path]:
    from leyline.proof import index

    return [index.write(given.out)]


def _page(given: argparse.Namespace, words: list[str]) -> list[Path]:
    from leyline.proof import report

    return report.render(given.file)


def _measured(
    kind: str, given: argparse.Namespace, words: list[str], run: Callable[[Say], dict[str, Any]]
) -> list[Path]:
    from leyline.bench.bed import machine
    from leyline.proof import report

    given.out.mkdir(parents=True, exist_ok=True)
    where = machine()
    with err.status(kind) as status:
        data = run(lambda text: status.update(f"{kind}: {text}"))
    return report.save(given.out, report.found(kind, words, where, given.quick, data))


def _model_path(given: Path | None) -> Path:
    if given is None:
        from leyline.models.smollm2 import smollm2_path

        return smollm2_path()
    if not (given / "config.json").is_file():
        raise ValueError(f"--model: {given} has no config.json; give a model directory")
    return given


def _threads() -> int:
    import torch

    return torch.get_num_threads()


if __name__ == "__main__":
    main()

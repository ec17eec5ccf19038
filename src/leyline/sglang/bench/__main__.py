"""python -m leyline.sglang.bench: measure the plugin on real SGLang, on this machine's CPU."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from leyline.sglang.bench.run import MEASUREMENTS, Options, run

out = Console()
err = Console(stderr=True)


def main(args: list[str] | None = None) -> None:
    given = _parser().parse_args(args)
    if find_spec("sglang") is None:
        sys.exit("SGLang is not installed here: pip install 'leyline-kv[sglang]'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with this process
    began = time.monotonic()
    options = Options(given.model or _smollm2(), tuple(given.only or ()), given.quick)
    with err.status("") as status:
        results = run(options, lambda name, text: status.update(f"{name}: {text}"))
    results.show(out, f"{(time.monotonic() - began) / 60:.1f} minutes")
    if given.json is not None:
        given.json.write_text(json.dumps(results.as_json(), indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("leyline.sglang.bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument(
        "--only", action="append", choices=list(MEASUREMENTS), help="one measurement; repeatable"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, one run each: to see that it works"
    )
    parser.add_argument("--model", type=Path, help="a model directory (default: SmolLM2)")
    return parser


def _smollm2() -> Path:
    from leyline.models import MissingExtra
    from leyline.models.smollm2 import smollm2_path

    try:
        return smollm2_path()
    except (MissingExtra, OSError) as trouble:
        sys.exit(str(trouble))


if __name__ == "__main__":
    main()

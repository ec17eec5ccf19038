"""python -m leyline.sglang.cpu MODEL [--plain] [flags of SGLang's server]

Starts SGLang's server on the CPU with Leyline's cache; --plain without Leyline, to compare with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from leyline.sglang.cpu import BACKEND, ENGINE

PLAIN = "--plain"
PLUGINS = "SGLANG_PLUGINS"
DEFAULTS: dict[str, str | None] = {
    "--device": "cpu",
    "--attention-backend": BACKEND,
    "--mem-fraction-static": "0.3",  # or SGLang asks for nearly all memory there is
    "--max-total-tokens": "32768",
    "--sleep-on-idle": None,  # or an idle server keeps a core busy
}
CACHE: dict[str, str | None] = {"--radix-cache-backend": "leyline"}


def command(args: Sequence[str]) -> list[str]:
    """SGLang's command line: MODEL and the flags given, and a default for what is not given."""
    model, flags = args[0], [arg for arg in args[1:] if arg != PLAIN]
    given = {flag.split("=")[0] for flag in flags}
    defaults = DEFAULTS if PLAIN in args else DEFAULTS | CACHE
    added = [
        part
        for flag, value in defaults.items()
        if flag not in given
        for part in (flag, value)
        if part is not None
    ]
    server = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    return [*server, *added, *flags]


def environment(outer: Mapping[str, str], *, plain: bool) -> dict[str, str]:
    """The server's environment: SGLang's CPU engine, its kernels' stand-in, no compiler."""
    stand_in = str(Path(__file__).with_name("stand_in"))
    paths = [path for path in outer.get("PYTHONPATH", "").split(os.pathsep) if path]
    env = {
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than it saves
        "OMP_WAIT_POLICY": "PASSIVE",  # or threads that wait keep the other processes from running
        **outer,
        ENGINE: "1",
        "PYTHONPATH": os.pathsep.join([stand_in, *paths]),
    }
    plugins = {name for name in outer.get(PLUGINS, "").split(",") if name}
    if plain:
        env[PLUGINS] = ",".join(sorted({*plugins, "leyline_cpu"} - {"leyline"}))
    elif plugins:  # unset: all that are installed
        env[PLUGINS] = ",".join(sorted({*plugins, "leyline", "leyline_cpu"}))
    return env


def main(args: Sequence[str]) -> None:
    if not args or args[0].startswith("-"):
        sys.exit(str(__doc__).strip())
    if find_spec("sglang") is None:
        sys.exit("SGLang is not installed here: pip install 'leyline-kv[sglang]'")
    env = environment(os.environ, plain=PLAIN in args)
    line = command(args)
    os.execve(line[0], line, env)


if __name__ == "__main__":
    main(sys.argv[1:])

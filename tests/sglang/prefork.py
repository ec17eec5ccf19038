"""Server processes forked from one that has imported SGLang: up in four seconds, not in fifteen."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

from leyline.sglang.cpu.__main__ import PLAIN, command, environment

IMPORTED = ("sglang.srt.entrypoints.http_server", "sglang.srt.models.registry")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(IMPORTED))


class Forked:
    """`python -m leyline.sglang.cpu ARGS`, as far as a subprocess.Popen is needed of it.

    env: as it would be for the command. Variables that SGLang reads while it is imported are those
    of this process when the first server started.
    """

    def __init__(self, args: Sequence[str], env: dict[str, str], log: Path) -> None:
        _ensure_running()
        log.touch()
        full = environment(env, plain=PLAIN in args)
        self._process = _context.Process(target=_serve, args=(command(args)[1:], full, log))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("server", timeout)
        return self._process.exitcode


def _ensure_running() -> None:
    """The process to fork from. It imports what a server would, the stand-in for kernels first."""
    outer = dict(os.environ)
    os.environ.update(environment({**outer, "PYTHONPATH": ""}, plain=False))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(outer)


def _serve(line: list[str], env: dict[str, str], log: Path) -> None:
    """In the new process: `python LINE`, LINE being ["-m", module, flags…]."""
    os.setsid()
    output = os.open(log, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
    sys.argv = line[1:]
    runpy.run_module(line[1], run_name="__main__", alter_sys=True)

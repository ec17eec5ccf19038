"""A server in a process of its own, for as long as a measurement takes."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

START_LIMIT_S = 240.0
ANSWER_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0


class Served:
    """`with Served(line, port) as served:` its `http` speaks to it. Ends with the block, and with
    all the processes that it started.

    health: a path that answers 200 once requests are taken. Raises RuntimeError, with the end of
    its log, where that doesn't happen. folder: its own, gone at the end. env: what it is started
    with; may be changed until then.
    """

    def __init__(self, line: Sequence[str], port: int, health: str = "/health") -> None:
        self._line, self._health = list(line), health
        self._folder = tempfile.TemporaryDirectory(prefix="leyline-bench-")
        self.folder = Path(self._folder.name)
        self._log = self.folder / "server.log"
        self.env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=ANSWER_LIMIT_S,
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=64),
        )

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                start_new_session=True,
            )
        try:
            self._wait(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while process.poll() is None and time.monotonic() < limit:
            try:
                if self.http.get(self._health).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        log = self._log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{self._line[2]}: the server did not start; its log ends with:\n{log}")

    def _stop(self) -> None:
        self.http.close()
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait(STOP_LIMIT_S)
        self._folder.cleanup()


def free_port() -> int:
    """A port that nobody listens on, below those that outgoing connections get: a server takes long
    to start, and it must still be free then."""
    return first_free(random.SystemRandom().sample(range(8_100, 12_000), 100))


def first_free(ports: Iterable[int]) -> int:
    """The first of these that nobody listens on. Raises RuntimeError if there is none."""
    for port in ports:
        with socket.socket() as it:
            try:
                it.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise RuntimeError("none of the ports is free")

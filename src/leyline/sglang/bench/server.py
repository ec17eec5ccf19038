"""A real SGLang server on the CPU, for as long as a measurement takes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import numpy as np

from leyline.sglang.bench import watch

START_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0
ANSWER_LIMIT_S = 300.0

FLAGS = ("--skip-server-warmup", "--sleep-on-idle", "--random-seed", "1", "--dtype", "float32")
"""Idle servers must not take time from the one that is measured."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What /generate answered, and how long that took over HTTP."""

    seconds: float
    prompt: int
    cached: int
    report: dict[str, Any] | None


class Server:
    """`with Server(model) as server:` a server process of its own; ends with the block.

    plugin: with Leyline's cache. watched: prefill passes are counted and attention is timed.
    """

    def __init__(
        self, model: Path, flags: Sequence[str] = (), *, plugin: bool = True, watched: bool = False
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="leyline-bench-")
        folder = Path(self._folder.name)
        self._log = folder / "server.log"
        self._env = _environment(folder if watched else None)
        port = _free_port()
        plain = () if plugin else ("--plain",)
        address = ("--host", "127.0.0.1", "--port", str(port))
        line = [sys.executable, "-m", "leyline.sglang.cpu", str(model)]
        self._line = [*line, *plain, *address, *FLAGS, *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=ANSWER_LIMIT_S,
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=64),
        )

    def __enter__(self) -> Server:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._line,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait()
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

    def generate(
        self, tokens: Sequence[int] | np.ndarray, new: int = 1, session: str | None = None
    ) -> Answer:
        """The likeliest `new` tokens behind a prompt; with one, the time is that to the first."""
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        if session is not None:
            params["custom_params"] = {"leyline": {"session": session}}
        body = {"input_ids": [int(token) for token in tokens], "sampling_params": params}
        began = time.perf_counter()
        answer = self.http.post("/generate", json=body)
        seconds = time.perf_counter() - began
        if answer.status_code != 200:
            raise RuntimeError(f"/generate answered {answer.status_code}: {answer.text[:500]}")
        meta = answer.json()["meta_info"]
        return Answer(seconds, meta["prompt_tokens"], meta["cached_tokens"], meta.get("leyline"))

    def flush(self) -> None:
        """Empty the cache; a request that has just ended may still be on its way out."""
        limit = time.monotonic() + STOP_LIMIT_S
        while self.http.post("/flush_cache").status_code != 200:
            if time.monotonic() > limit:
                raise RuntimeError("the cache can't be flushed: requests are still running")
            time.sleep(0.05)

    def seen(self) -> watch.Seen:
        """What a watched server has done so far."""
        state = self.http.get("/server_info").raise_for_status().json()["internal_states"][0]
        return watch.Seen(**state[watch.KEY])

    def _wait(self) -> None:
        assert self._process is not None
        limit = time.monotonic() + START_LIMIT_S
        while True:
            if self._process.poll() is not None or time.monotonic() > limit:
                log = self._log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"SGLang's server did not start; its log ends with:\n{log}")
            try:
                if self.http.get("/health_generate").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    def _stop(self) -> None:
        self.http.close()
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait(STOP_LIMIT_S)
        self._folder.cleanup()


def _environment(watched_in: Path | None) -> dict[str, str]:
    """Of a server. watched_in: where to put what makes SGLang find watch.py, a distribution that
    has nothing but an entry point."""
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    env.pop("SGLANG_PLUGINS", None)
    if watched_in is not None:
        info = watched_in / "plugins" / "leyline_bench-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leyline-bench\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[sglang.srt.plugins]\nleyline_bench = {watch.__name__}:activate\n"
        )
        paths = [str(info.parent), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env


def _free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        port: int = it.getsockname()[1]
        return port

"""A real SGLang server on the CPU, for as long as a measurement takes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leyline.bench.served import STOP_LIMIT_S, Served, free_port
from leyline.sglang.bench import watch

FLAGS = ("--skip-server-warmup", "--sleep-on-idle", "--random-seed", "1", "--dtype", "float32")
"""Idle servers must not take time from the one that is measured."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What /generate answered, and how long that took over HTTP."""

    seconds: float
    prompt: int
    cached: int
    report: dict[str, Any] | None


class Server(Served):
    """`with Server(model) as server:` a server process of its own; ends with the block.

    plugin: with Leyline's cache. watched: prefill passes are counted and attention is timed.
    """

    def __init__(
        self, model: Path, flags: Sequence[str] = (), *, plugin: bool = True, watched: bool = False
    ) -> None:
        port = free_port()
        plain = () if plugin else ("--plain",)
        address = ("--host", "127.0.0.1", "--port", str(port))
        line = [sys.executable, "-m", "leyline.sglang.cpu", str(model)]
        super().__init__([*line, *plain, *address, *FLAGS, *flags], port, "/health_generate")
        self.env.pop("SGLANG_PLUGINS", None)
        if watched:
            _make_watched(self.folder, self.env)

    def generate(
        self,
        tokens: Sequence[int] | np.ndarray,
        new: int = 1,
        session: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Answer:
        """The likeliest `new` tokens behind a prompt; with one, the time is that to the first.
        options: of the session's `leyline` object."""
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        if session is not None:
            params["custom_params"] = {"leyline": {"session": session, **(options or {})}}
        body = {"input_ids": [int(token) for token in tokens], "sampling_params": params}
        began = time.perf_counter()
        answer = self.http.post("/generate", json=body)
        seconds = time.perf_counter() - began
        if answer.status_code != 200:
            raise RuntimeError(f"/generate answered {answer.status_code}: {answer.text[:500]}")
        meta = answer.json()["meta_info"]
        return Answer(seconds, meta["prompt_tokens"], meta["cached_tokens"], meta.get("leyline"))

    def edit(
        self, tokens: Sequence[int] | np.ndarray, session: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Make a prompt of a session now; the report."""
        body = {"prompt": [int(token) for token in tokens], **options}
        path = f"/v1/leyline/sessions/{session}/directives"
        report: dict[str, Any] = self.http.post(path, json=body).raise_for_status().json()
        return report

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


def _make_watched(folder: Path, env: dict[str, str]) -> None:
    """Let SGLang find watch.py: a distribution in `folder` that has nothing but an entry point."""
    info = folder / "plugins" / "leyline_bench-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leyline-bench\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\nleyline_bench = {watch.__name__}:activate\n"
    )
    paths = [str(info.parent), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)

"""Real SGLang servers for tests: started, asked, looked into, stopped and checked for leaks.

A server's folder, with its log, is removed with it, but for one that a test failed with.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
import weakref
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import torch
from openai import OpenAI
from prefork import Forked

from leyline.bench.served import first_free

HERE = Path(__file__).parent
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = count(12_000 + 4_000 * (_WORKER % 5))
"""They stay free until a server is up: below those that outgoing connections get, and of this
process alone among those that share the tests. (SGLang takes a second one, up to 1000 further on.)
"""
START_LIMIT = 240.0
STOP_LIMIT = 60.0
READY = "The server is fired up and ready to roll!"
BAD = re.compile(r"Traceback \(most recent|\bleak\b|Mem Leak|pool memory|Failed to (apply|execute)")
FLAGS = {
    "--host": "127.0.0.1",
    "--max-total-tokens": "20000",
    "--random-seed": "1",
    "--skip-server-warmup": None,
}


@dataclass(frozen=True)
class Answer:
    """What /generate answered: HTTP's status, and the body as it came."""

    status: int
    body: Any

    @property
    def meta(self) -> dict[str, Any]:
        assert self.status == 200, f"HTTP {self.status}: {self.body}"
        return self.body["meta_info"]

    @property
    def ids(self) -> list[int]:
        """The tokens that were generated."""
        assert self.status == 200, f"HTTP {self.status}: {self.body}"
        return self.body["output_ids"]

    @property
    def cached(self) -> int:
        return self.meta["cached_tokens"]

    @property
    def logprobs(self) -> list[float]:
        """Of the generated tokens; the request must have asked for them."""
        return [each[0] for each in self.meta["output_token_logprobs"]]

    @property
    def report(self) -> dict[str, Any]:
        """The `leyline` object of the answer."""
        report = self.meta["leyline"]
        return report[0] if isinstance(report, list) else report

    @property
    def error(self) -> str:
        assert self.status != 200, self.body
        error = self.body.get("error", self.body)
        return error["message"] if isinstance(error, dict) else str(error)


@dataclass(frozen=True)
class Slots:
    """Where the scheduler's slots are. They add up to `total` at any time (I7)."""

    total: int
    available: int
    evictable: int
    protected: int
    uncached: int

    @property
    def add_up(self) -> bool:
        return self.total == self.available + self.evictable + self.protected + self.uncached


@dataclass(frozen=True)
class Rows:
    """A request's row as it was let go of. keys, values: per layer [tokens, heads, columns];
    values of MLA are the first columns of its keys."""

    ids: list[int]
    slots: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class Server:
    """`with Server(model, "--page-size", "16") as server:` a server process of its own.

    plugin: with Leyline's cache. strict: SGLang counts its slots at every step, and dies when they
    don't add up. fork: starts in half the time; without it, each process starts from nothing, as
    SGLang does it outside of tests.
    """

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        plugin: bool = True,
        strict: bool = True,
        fork: bool = True,
        env: dict[str, str] | None = None,
    ) -> None:
        self.model, self.flags, self.plugin, self.strict = Path(model), flags, plugin, strict
        self.port = first_free(_PORTS)
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = Path(mkdtemp(prefix="leyline-sglang-"))
        self._tidy = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.log_file = self.folder / "server.log"
        self._env = self._environment(fork) | (env or {})
        # SGLang reads some of its variables when it is imported.
        self._forked = fork and not env
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._stopping = False
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.stop()
        else:
            self._kill()
            self._tidy.detach()  # the log is wanted
            print(f"The server's log ends with:\n{self.log()[-6000:]}")

    def start(self) -> Server:
        """Returns when it answers. Raises RuntimeError, with the log, if it dies before."""
        args = [str(self.model), *([] if self.plugin else ["--plain"])]
        args += ["--port", str(self.port), *self.flags]
        for flag, value in {**FLAGS, "--dtype": self._dtype()}.items():
            if flag not in self.flags:
                args += [flag] if value is None else [flag, value]
        if self._forked:
            self._process = Forked(args, self._env, self.log_file)
        else:
            line = [sys.executable, "-m", "leyline.sglang.cpu", *args]
            with self.log_file.open("wb") as log:
                self._process = subprocess.Popen(
                    line, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
        limit = time.monotonic() + START_LIMIT
        try:
            while not self._ready():
                if not self.alive:
                    raise RuntimeError(f"the server ended while it started:\n{self.log()[-6000:]}")
                if time.monotonic() > limit:
                    raise RuntimeError(f"no server after {START_LIMIT} s:\n{self.log()[-6000:]}")
                time.sleep(0.1)
        except BaseException:
            self._kill()
            raise
        return self

    def ask_to_stop(self) -> None:
        """Ends soon. SGLang looks every five seconds whether it should."""
        assert self._process is not None
        self._stopping = self.alive
        if self._stopping:
            self._process.terminate()

    def stop(self) -> None:
        """Ends it. Fails if it doesn't end, or if its log tells of a leak or an exception."""
        assert self._process is not None
        if not self._stopping:
            self.ask_to_stop()
        alive = self._stopping
        try:
            if alive:
                self._process.wait(STOP_LIMIT)
        finally:
            self._kill()
        # Before it is ready, SGLang asks itself whether it is, and logs each time that it isn't.
        log = self.log().partition(READY)[2]
        bad = [line for line in log.splitlines() if BAD.search(line)]
        if bad or not alive:
            self._tidy.detach()
        state = f"died with {self._process.returncode}" if not alive else "was stopped"
        assert alive and self._process.returncode in (0, -signal.SIGTERM) and not bad, (
            f"The server {state}; in its log: {bad}\n{self.log()[-8000:]}"
        )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        answer = self.http.post(path, json=body)
        try:
            return answer.status_code, answer.json()
        except json.JSONDecodeError:
            return answer.status_code, answer.text

    def generate(
        self,
        ids: list[int],
        n: int = 1,
        leyline: dict[str, Any] | None = None,
        carrier: str = "custom_params",
        probe: str | None = None,
        **fields: Any,
    ) -> Answer:
        """n tokens, the likeliest ones, by /generate.

        carrier: where the `leyline` object goes: `custom_params`, `json` (there, as a string) or
        `kv_hints`. probe: a name for `rows`. fields: others of the body; `sampling_params` are
        added to those here.
        """
        custom: dict[str, Any] = {"probe": probe} if probe else {}
        body: dict[str, Any] = {"input_ids": ids, **fields}
        if leyline is not None and carrier == "kv_hints":
            body["kv_hints"] = kv_hints(leyline)
        elif leyline is not None:
            custom["leyline"] = json.dumps(leyline) if carrier == "json" else leyline
        body["sampling_params"] = {
            "temperature": 0,
            "max_new_tokens": n,
            "ignore_eos": True,
            **({"custom_params": custom} if custom else {}),
            **fields.get("sampling_params", {}),
        }
        return Answer(*self.post("/generate", body))

    def openai(self) -> OpenAI:
        """The official client. It must not try again: tests want to see the first answer."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def rows(self, probe: str) -> Rows:
        """The row of a request that had `probe`; its answer must be there."""
        file = self.folder / f"{probe}.pt"
        _until(file.is_file, f"no rows in {file}")
        return Rows(**torch.load(file))

    def slots(self) -> Slots:
        """Once the scheduler has nothing left to do."""
        found: list[Slots] = []

        def settled() -> bool:
            found[:] = [Slots(**self.internal_state()["slots"])]
            return found[0].uncached == 0 and found[0].protected == 0

        _until(settled, f"the server does not come to rest: {found}")
        return found[0]

    def internal_state(self) -> dict[str, Any]:
        answer = self.http.get("/server_info")
        assert answer.status_code == 200, answer.text
        return answer.json()["internal_states"][0]

    def flush(self) -> None:
        """Empty the radix cache."""
        _until(lambda: self.post("/flush_cache", None)[0] == 200, "the cache can't be flushed")

    def _dtype(self) -> str:
        """The checkpoint's own. (SGLang would make bf16 of fp32.)"""
        config = json.loads((self.model / "config.json").read_text())
        return config.get("dtype") or config.get("torch_dtype") or "auto"

    def _ready(self) -> bool:
        if READY not in self.log():
            return False
        try:
            return self.http.get("/health_generate").status_code == 200
        except httpx.TransportError:
            return False

    def _environment(self, fork: bool) -> dict[str, str]:
        probe = _probe_entry_point(self.folder)
        paths = [str(probe), str(HERE), os.environ.get("PYTHONPATH", "")]
        env = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",  # tiny models; threads that spin cost the other processes
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "LEYLINE_SGLANG_DEBUG_DIR": str(self.folder),
            "LEYLINE_CPU_FORK": str(int(fork)),
            "SGLANG_PLUGINS": "leyline_probe",
        }
        if self.strict:
            env["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "2"
        return env

    def _kill(self) -> None:
        """The whole group, whatever state it is in."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(STOP_LIMIT)


def kv_hints(payload: dict[str, Any]) -> dict[str, Any]:
    """SGLang's envelope for a hint to the cache, with a `leyline` object in it."""
    action = {
        "action_id": "1",
        "action_type": "leyline.edit",
        "action_version": "1",
        "payload": payload,
    }
    return {"protocol_version": "1", "message_id": uuid.uuid4().hex, "actions": [action]}


def _probe_entry_point(folder: Path) -> Path:
    """What makes SGLang find probe.py: a distribution that has nothing but an entry point."""
    info = folder / "plugins" / "leyline_probe-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leyline-probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nleyline_probe = probe:activate\n")
    return info.parent


def _until(true: Any, otherwise: str, limit: float = 30.0) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)

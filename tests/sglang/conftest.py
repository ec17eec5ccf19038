"""Checkpoints on disk and running servers, shared by all tests that want the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest

if util.find_spec("sglang") is None:
    pytest.exit("SGLang is not installed in this environment; run: make test-sglang", returncode=2)

# For tests that import SGLang in this process.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "src/leyline/sglang/cpu/stand_in"))

import torch
from checkpoints import write_checkpoint
from harness import Server

AT_ONCE = 2  # servers that run at a time
PLAIN = ("mla", (), "float32")
"""The server that stays: nothing special about it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first: when tests are shared out, nobody is left with them at the end."""
    items.sort(key=lambda item: item.path.name != "test_stress.py")


class Servers:
    """Running servers by what they were started with; the longest unused ends for another."""

    def __init__(self, checkpoint: Callable[..., Path]) -> None:
        self._checkpoint = checkpoint
        self._running: dict[Any, Server] = {}
        self._ending: list[Server] = []

    def __call__(
        self, kind: str = "mla", *flags: str, dtype: str = "float32", **options: Any
    ) -> Any:
        """A server for write_checkpoint(kind, dtype), with Server's own flags and options. It is
        shared: a test that counts flushes it first, and names its own sessions."""
        key = (kind, flags, dtype, *sorted(options.items()))
        server = self._running.pop(key, None)
        if server is not None and not server.alive:
            server.stop()  # says why
        if server is None:
            others = [other for other in self._running if other != PLAIN]
            for other in others[: len(others) - AT_ONCE + 2]:
                self._end(self._running.pop(other))
            server = Server(self._checkpoint(kind, dtype), *flags, **options).start()
        self._running[key] = server
        return server

    def _end(self, server: Server) -> None:
        server.ask_to_stop()
        self._ending.append(server)

    def stop(self) -> None:
        errors = []
        for server in self._running.values():
            self._end(server)
        for server in self._ending:
            try:
                server.stop()
            except AssertionError as error:
                errors.append(str(error))
        assert not errors, "\n".join(errors)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint("mla" | "gqa", "float32" | "bfloat16" | "float16"): a folder, made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def made(kind: str, dtype: str = "float32") -> Path:
        folder = root / f"{kind}-{dtype}"
        if not folder.exists():
            write_checkpoint(folder, kind, getattr(torch, dtype))
        return folder

    return made


@pytest.fixture(scope="session")
def servers(checkpoint: Callable[..., Path]) -> Iterator[Servers]:
    """servers("mla", "--page-size", "16"): a running server, shared with who asks for the same."""
    it = Servers(checkpoint)
    yield it
    it.stop()


@pytest.fixture(scope="session")
def server(servers: Servers) -> Server:
    """MLA, with Leyline, nothing special; it runs until all tests are over."""
    return servers()

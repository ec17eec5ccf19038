"""The peers, each a server that takes token ids over HTTP and says what it computed.

All answer one token, whole: the time of a request is the time to its first token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Protocol

import httpx

from leyline.bench.served import Served, free_port

XLLAMACPP = "2026.10.11549"


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request. computed: tokens of the prompt that were not taken from a cache."""

    seconds: float
    prompt: int
    computed: int


class Client(Protocol):
    """A running peer."""

    def __call__(self, tokens: Sequence[int], *, session: str | None, cached: bool) -> Answer:
        """cached: the prompt may use what the server knows. session: for peers that know them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """model: a directory for Transformers. gguf: the same weights, for llama.cpp. longest: tokens
    of a prompt and its answer."""

    model: Path
    gguf: Path | None
    longest: int
    threads: int


@dataclass(frozen=True, slots=True)
class Peer:
    """name: in results. what: one line for people. needs: a module, and how to get it."""

    name: str
    what: str
    sessions: bool
    needs: tuple[str, str]
    package: str
    start: Callable[[Setting], AbstractContextManager[Client]]

    @property
    def missing(self) -> str | None:
        """What to install; None if it is there."""
        module, how = self.needs
        return None if util.find_spec(module) else f"{self.name} needs {module}: {how}"

    @property
    def version(self) -> str:
        return metadata.version(self.package)


@contextmanager
def _llamacpp(setting: Setting, reuse: int) -> Iterator[Client]:
    if setting.gguf is None:
        raise ValueError("llama.cpp needs the weights as a GGUF file: give --gguf FILE")
    port = free_port()
    given = (setting.gguf, port, reuse, setting.longest, setting.threads)
    line = [sys.executable, "-m", "leyline.proof.llamacpp", *map(str, given)]
    with Served(line, port) as served:

        def ask(tokens: Sequence[int], *, session: str | None, cached: bool) -> Answer:
            body = {"prompt": list(tokens), "n_predict": 1, "temperature": 0}
            body["cache_prompt"] = cached
            seconds, found = _post(served.http, "/completion", body)
            return Answer(seconds, len(tokens), found["timings"]["prompt_n"])

        yield ask


@contextmanager
def _embedded(setting: Setting) -> Iterator[Client]:
    port = free_port()
    given = (setting.model, port, setting.longest)
    line = [sys.executable, "-m", "leyline.proof.embedded", *map(str, given)]
    with Served(line, port) as served:

        def ask(tokens: Sequence[int], *, session: str | None, cached: bool) -> Answer:
            body: dict[str, Any] = {"model": "model", "prompt": list(tokens), "max_tokens": 1}
            body |= {"temperature": 0, "ignore_eos": True}
            if session is not None:
                body["leyline"] = {"session": session, "strict": True}
            seconds, found = _post(served.http, "/v1/completions", body)
            usage = found["usage"]
            from_cache = usage["prompt_tokens_details"]["cached_tokens"]
            return Answer(seconds, usage["prompt_tokens"], usage["prompt_tokens"] - from_cache)

        yield ask


@contextmanager
def _sglang(setting: Setting, plugin: bool) -> Iterator[Client]:
    from leyline.sglang.bench.server import Server

    slots = ("--max-total-tokens", str(6 * setting.longest))
    with Server(setting.model, slots, plugin=plugin) as server:

        def ask(tokens: Sequence[int], *, session: str | None, cached: bool) -> Answer:
            answer = server.generate(tokens, session=session)
            return Answer(answer.seconds, answer.prompt, answer.prompt - answer.cached)

        yield ask


def _post(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    began = time.perf_counter()
    answer = http.post(path, json=body)
    seconds = time.perf_counter() - began
    if answer.status_code != 200:
        raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text[:500]}")
    return seconds, answer.json()


_LLAMA = ("xllamacpp", f"pip install xllamacpp=={XLLAMACPP}")
_SGLANG = ("sglang", "make sglang-bench makes an environment with it")
_OURS = ("fastapi", "pip install 'leyline-kv[server]'")

PEERS = (
    Peer(
        "llama.cpp",
        "its server, exact prefixes only",
        False,
        _LLAMA,
        "xllamacpp",
        lambda setting: _llamacpp(setting, 0),
    ),
    Peer(
        "llama.cpp, cache-reuse 64",
        "its server, which also shifts runs of 64 equal tokens or more",
        False,
        _LLAMA,
        "xllamacpp",
        lambda setting: _llamacpp(setting, 64),
    ),
    Peer(
        "SGLang",
        "its radix cache, exact prefixes only",
        False,
        _SGLANG,
        "sglang",
        lambda setting: _sglang(setting, plugin=False),
    ),
    Peer(
        "SGLang with Leyline",
        "the plugin, a session for each conversation",
        True,
        _SGLANG,
        "sglang",
        lambda setting: _sglang(setting, plugin=True),
    ),
    Peer(
        "Leyline's engine",
        "the embedded engine, a session for each conversation",
        True,
        _OURS,
        "leyline-kv",
        _embedded,
    ),
)

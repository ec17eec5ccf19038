"""What a server is and can, found out by asking it: no server needs to be told of."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from leyline.replay.client import CallError, Client
from leyline.traces import Message

EXTRAS: dict[str, Any] = {
    "logprobs": True,
    "top_logprobs": 2,
    "ignore_eos": True,
    "cache_prompt": True,
}
"""First tokens to compare; answers of one length; and older llama.cpp caches only when told to.
Left out for a server that refuses one of them."""

FLUSHES = ("/flush_cache", "/reset_prefix_cache")
"""Of SGLang; of vLLM in its development mode."""

FLUSH_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """kind: who /v1/models says owns the model: leyline, sglang, vllm, llamacpp, or "unknown".
    sessions: answers carry a report on a session. counts: it says how many tokens were cached.
    flush: the path that empties its cache, None if there is none."""

    url: str
    kind: str
    model: str
    max_tokens: int | None
    sessions: bool
    counts: bool
    flush: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def look(client: Client, model: str | None = None) -> Server:
    """Set the client up for its server. model: the first one that is served, by default.

    Raises ValueError for what is no such server. Its cache is emptied if it can be.
    """
    known = _model(client, model)
    client.model = known["id"]
    messages = _probe()
    client.extras = dict(EXTRAS)
    try:
        _first(client, messages)
        again = client.ask(messages)
        sessions = _knows_sessions(client)
        flush = _flush_path(client, messages, again.cached)
    except CallError as trouble:
        raise ValueError(f"{client.root}: a first call failed: {trouble}") from trouble
    limit = known.get("max_model_len") or (known.get("meta") or {}).get("n_ctx")
    return Server(
        url=client.root,
        kind=str(known.get("owned_by") or "unknown"),
        model=client.model,
        max_tokens=limit,
        sessions=sessions,
        counts=bool(again.cached),
        flush=flush,
    )


def empty(client: Client, path: str, limit_s: float = FLUSH_LIMIT_S) -> None:
    """Empty the server's cache. Raises ValueError if it doesn't let that happen."""
    end = time.monotonic() + limit_s
    while (status := _post(client, path)) != 200:
        if status in (401, 403, 404, 405) or time.monotonic() > end:
            raise ValueError(f"{client.root}{path}: answers {status}, the cache isn't emptied")
        time.sleep(0.1)  # a request that has just ended may still be on its way out


def _model(client: Client, name: str | None) -> dict[str, Any]:
    """What /v1/models says about the model."""
    url = f"{client.root}/v1/models"
    try:
        answer = client.http.get(url, timeout=30.0)
        served = answer.json()["data"] if answer.status_code == 200 else []
        models = {str(each["id"]): dict(each) for each in served}
    except (httpx.HTTPError, httpx.InvalidURL) as trouble:
        raise ValueError(f"{url}: no server answers ({trouble})") from trouble
    except (ValueError, KeyError, TypeError) as trouble:
        raise ValueError(f"{url}: the answer is no list of models") from trouble
    if answer.status_code in (401, 403):
        raise ValueError(f"{url}: HTTP {answer.status_code}; {_key_trouble(client)}")
    if name is not None:
        return models.get(name, {"id": name})  # an adapter's name may be missing in the list
    if not models:
        raise ValueError(f"{url}: HTTP {answer.status_code}, no models; name one with --model")
    return next(iter(models.values()))


def _key_trouble(client: Client) -> str:
    if client.has_key:
        return "the server refused the key that it was given with --api-key"
    return "give its key with --api-key"


def _probe() -> list[Message]:
    """A prompt that no cache holds yet."""
    numbers = " ".join(f"{time.time_ns() * (i + 7) % 9973}" for i in range(30))
    return [{"role": "user", "content": f"Say something about these numbers: {numbers}"}]


def _first(client: Client, messages: list[Message]) -> None:
    """The first calls set things up on the server, and show which fields it refuses."""
    try:
        client.ask(messages)
    except CallError as trouble:
        if trouble.status not in (400, 422):
            raise
        client.extras = {}
        client.ask(messages)


def _knows_sessions(client: Client) -> bool:
    """Whether a `leyline` object gets a report. Other servers ignore it, or refuse it."""
    try:
        answer = client.ask(_probe(), leyline={"session": f"replay-probe-{time.time_ns()}"})
    except CallError as trouble:
        if trouble.status not in (400, 422):
            raise
        return False
    return answer.report is not None


def _flush_path(client: Client, messages: list[Message], cached: int | None) -> str | None:
    """The path that empties the cache, and is seen to do so where the server counts."""
    for path in FLUSHES:
        try:
            empty(client, path, 10.0)
        except ValueError:
            continue
        if not cached or (client.ask(messages).cached or 0) < cached:
            return path
    return None


def _post(client: Client, path: str) -> int:
    try:
        return client.http.post(f"{client.root}{path}", timeout=60.0).status_code
    except httpx.HTTPError as trouble:
        raise CallError(f"{path}: {type(trouble).__name__}: {trouble}") from trouble

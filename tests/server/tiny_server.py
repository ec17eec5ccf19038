"""A really running server on a tiny random model, for tests."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
from openai import OpenAI
from tiny_bpe import tiny_bpe

from leyline.engine.engine import Config, Engine, Stats
from leyline.server.limits import Settings
from leyline.server.metrics import Metrics
from leyline.server.run import listen, make_server, url_of
from leyline.tiny import tiny_model

TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('Role ' + message.role + ' is not one of mine.') }}
{%- endif %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}</call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if shout %}LOUD{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@cache
def tiny_tokenizer() -> Any:
    """A byte-level BPE of 512 tokens with a ChatML-like chat template; token 2 ends an answer."""
    return tiny_bpe(TEMPLATE)


@dataclass
class Running:
    """A server, its engine, and clients of it."""

    engine: Engine
    url: str
    keys: tuple[str, ...]
    metrics: Metrics

    def client(self, key: str | None = None) -> OpenAI:
        """The official client. It must not try again: tests want to see the first answer."""
        key = key or (self.keys[0] if self.keys else "none")
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def http(self, key: str | None = None) -> httpx.Client:
        key = key or (self.keys[0] if self.keys else None)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def answered(self) -> float:
        """HTTP requests that are over, those of clients that hung up included."""
        found = next(iter(self.metrics.requests.collect())).samples
        return sum(sample.value for sample in found if sample.name.endswith("_total"))

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 if there is none yet."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def settled(self) -> Stats:
        """Stats once nothing runs any more; slots must add up then (I7)."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            stats = self.engine.stats()
            if not stats.running and not stats.waiting:
                assert stats.private == 0
                assert stats.free + stats.cached == stats.capacity
                return stats
            time.sleep(0.01)
        raise AssertionError(f"requests never ended: {stats}")


def tiny_engine(model: str = "llama", rows: int = 20_000, **config: Any) -> Engine:
    """An engine with a cache of about `rows` rows."""
    built = tiny_model(model, vocab_size=len(tiny_tokenizer()), eos_token_id=2)
    per_row = 3 * 2 * 2 * 64 * 4  # layers, keys and values, heads, width, bytes
    settings = {"memory_gib": rows * per_row / 1024**3, "max_tokens": 8192, **config}
    return Engine(built, tiny_tokenizer(), Config(**settings), "tiny")


@contextmanager
def running(
    engine: Engine | None = None,
    settings: Settings | None = None,
    grace_s: float = 0.5,
    **config: Any,
) -> Iterator[Running]:
    """Serve on a free port until the block ends."""
    engine = engine or tiny_engine(**config)
    settings = settings or Settings()
    with listen("127.0.0.1", 0) as listener:
        server = make_server(engine, settings, log_level="error", grace_s=grace_s)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            state = server.config.app.state.leyline  # type: ignore[union-attr]
            yield Running(engine, url_of(listener), settings.api_keys, state.metrics)
        finally:
            server.should_exit = True
            thread.join(timeout=30)
            engine.close()
            assert not thread.is_alive()


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Between two passes, the engine does nothing until the block ends."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=engine.call, args=(wait,))
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        go_on.set()
        thread.join()


def until(true: Callable[[], bool]) -> None:
    """Wait for something that happens on another thread."""
    last = time.monotonic() + 30
    while not true():
        assert time.monotonic() < last, "it never happened"
        time.sleep(0.005)


def words(seed: int, n: int = 200) -> str:
    """`n` words of made-up text, always the same for a seed."""
    dice = random.Random(seed)
    return " ".join(
        "".join(dice.choice(part) for part in ("bdfgklmnprst", "aeiou", "nrst")) for _ in range(n)
    )

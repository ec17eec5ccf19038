"""`leyline serve`"""

from __future__ import annotations

import logging
from typing import Annotated

import typer
from rich.markup import escape

from leyline.cli.common import SMOLLM2, err, fail, for_people, loading, model_path


def serve(
    model: Annotated[str, typer.Argument(help="A model directory, smollm2 or nano.")] = SMOLLM2,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="LEYLINE_API_KEY", help="A key that clients must send; repeatable."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name for clients.")] = None,
    memory: Annotated[float, typer.Option(help="GiB for cached rows.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    max_running: Annotated[int, typer.Option(min=1, help="Requests in one pass.")] = 16,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests in the queue.")] = 64,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens in one pass.")] = 1024,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Of prompt and answer; default: what the model takes.")
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions held.")] = 1024,
    session_ttl: Annotated[
        float, typer.Option(min=1, help="Seconds an idle session is held.")
    ] = 3600,
    directives: Annotated[
        bool, typer.Option(help="Off: sessions are served without splices.")
    ] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over HTTP, as OpenAI does, with sessions and directives."""
    if log_level not in ("debug", "info", "warning", "error"):
        fail(f"--log-level: {log_level!r} is none of debug, info, warning, error")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        fail(f"--dtype: {dtype!r} is none of auto, float32, bfloat16, float16")
    if api_key and not all(key.strip() for key in api_key):
        fail("--api-key: a key must not be empty")
    with for_people():
        from leyline.engine.engine import Config, Engine
        from leyline.server.limits import Settings
        from leyline.server.run import serve as run_server

        logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(message)s")
        config = Config(
            memory_gib=memory,
            max_running=max_running,
            max_waiting=max_waiting,
            chunk=chunk,
            max_tokens=max_tokens,
            max_sessions=max_sessions,
            session_ttl_s=session_ttl,
            directives=directives,
        )
        with err.status(f"Loading {escape(model)} …"):
            path, known_as = model_path(model)
            with loading(model):
                engine = Engine.load(
                    path, dtype=dtype, device=device, config=config, name=name or known_as
                )
        stats = engine.stats()
        err.print(
            f"{escape(engine.name)}: room for {stats.capacity:,} cached tokens, "
            f"up to {engine.max_tokens:,} in a request",
            highlight=False,
        )
        if engine.max_tokens < 256:
            err.print("That is too little for most prompts: give more --memory", highlight=False)
        run_server(
            engine,
            host,
            port,
            Settings(api_keys=tuple(api_key or ())),
            log_level=log_level,
            on_ready=lambda url: err.print(f"Listening on {url}/v1", highlight=False),
        )

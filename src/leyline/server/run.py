"""uvicorn around the application."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Callable

import uvicorn

from leyline.engine.engine import Engine
from leyline.server.app import create_app
from leyline.server.inspect.records import Records
from leyline.server.limits import Settings

log = logging.getLogger("leyline.server")

GRACE_S = 10
"""How long answers that are under way may take when the server is to stop."""
_FAREWELL_S = 5
"""How long the errors of those that took longer may take to be sent."""


def serve(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    *,
    log_level: str = "info",
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until interrupted, then close the engine.

    port 0 takes a free one. on_ready: called with the server's URL once it listens. Raises OSError
    if the address can't be had.
    """
    settings = settings or Settings()
    with listen(host, port) as listener:
        if not settings.api_keys and not _is_loopback(host):
            log.warning("no API key is set: whoever reaches %s can use this server", host)
        server = make_server(engine, settings, log_level)
        if on_ready is not None:
            on_ready(url_of(listener))
        try:
            server.run(sockets=[listener])
        finally:
            engine.close()


class Server(uvicorn.Server):
    """uvicorn's server; when its time is up, requests end with an error and are not cut off. Who
    only looks on is not waited for."""

    def __init__(
        self, config: uvicorn.Config, engine: Engine, records: Records, grace_s: float
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._records = records
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's. Closes the engine once `grace_s` seconds are over."""
        self._records.close()
        end = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._grace_s)
        log.info("closing: requests still running end now")
        await asyncio.to_thread(self._engine.close)


def make_server(
    engine: Engine, settings: Settings, log_level: str = "info", grace_s: float = GRACE_S
) -> Server:
    """A server to be run with a listening socket: `server.run(sockets=[listener])`."""
    app = create_app(engine, settings)
    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(grace_s) + _FAREWELL_S,
    )
    return Server(config, engine, app.state.leyline.records, grace_s)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small pieces at once only on sockets that say their protocol. Without, every
    # streamed token waits for the client's acknowledgement of the last one: 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it would let two servers have one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        return listener
    except OSError as error:
        listener.close()
        what = error.strerror or str(error)
        raise OSError(error.errno, f"can't listen on {host}, port {port}: {what}") from error


def url_of(listener: socket.socket) -> str:
    """Where a listening socket is reached."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""The application: what is where, and in which order."""

from __future__ import annotations

import time

from fastapi import FastAPI

from leyline.engine.engine import Engine
from leyline.server import chat, completions, health, messages, sessions
from leyline.server.auth import AuthMiddleware, Keys
from leyline.server.errors import install
from leyline.server.inspect import page, routes
from leyline.server.inspect.records import Bounds, Records
from leyline.server.limits import OpenRequestsMiddleware, Settings
from leyline.server.metrics import Metrics, MetricsMiddleware
from leyline.server.prepare import Defaults, State
from leyline.server.text import Text


def create_app(engine: Engine, settings: Settings | None = None) -> FastAPI:
    """The HTTP application around a running engine, which it does not close."""
    settings = settings or Settings()
    app = FastAPI(title="Leyline", docs_url=None, redoc_url=None, openapi_url=None)
    config = engine.config
    records = Records(Bounds(sessions=config.max_sessions, ttl_s=config.session_ttl_s))
    engine.on_drop(records.drop)
    app.state.leyline = state = State(
        engine=engine,
        settings=settings,
        text=Text(engine.tokenizer),
        metrics=Metrics(),
        defaults=Defaults.of(engine),
        records=records,
        started=int(time.time()),
    )
    # The last one added sees a request first.
    app.add_middleware(OpenRequestsMiddleware, most=settings.max_open)
    app.add_middleware(AuthMiddleware, keys=Keys(settings.api_keys))
    app.add_middleware(MetricsMiddleware, metrics=state.metrics)
    install(app)
    for part in (health, chat, completions, messages, routes, sessions, page):
        app.include_router(part.router)
    return app

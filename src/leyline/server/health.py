"""/health, /metrics and /v1/models."""

from __future__ import annotations

import logging

import anyio
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from leyline.api.openai_answers import Model, ModelList
from leyline.channel import EngineError
from leyline.server.prepare import State, check_model

log = logging.getLogger("leyline.server")
router = APIRouter()

_PATIENCE_S = 2.0
"""How long /metrics waits for the engine to be between two passes."""


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests can be served, else 503. Needs no key."""
    state: State = request.app.state.leyline
    if state.engine.alive:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "closing"}, 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format. Gauges are as of the last scrape if the engine is busy for long."""
    state: State = request.app.state.leyline
    try:
        with anyio.move_on_after(_PATIENCE_S):
            stats = await to_thread.run_sync(
                state.engine.stats, abandon_on_cancel=True, limiter=_scrapes(request)
            )
            state.metrics.set_stats(stats)
    except EngineError:
        log.debug("the engine is closing, its gauges stay as they are")
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/models")
async def models(request: Request) -> ModelList:
    return ModelList(data=[_model(request.app.state.leyline)])


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Model:
    state: State = request.app.state.leyline
    check_model(name, state.engine)
    return _model(state)


def _model(state: State) -> Model:
    engine = state.engine
    return Model(id=engine.name, created=state.started, max_model_len=int(engine.max_tokens))


def _scrapes(request: Request) -> CapacityLimiter:
    """Scrapes that wait for a busy engine must not take the threads that requests need."""
    app_state = request.app.state
    if not hasattr(app_state, "scrapes"):
        app_state.scrapes = CapacityLimiter(1)
    return app_state.scrapes

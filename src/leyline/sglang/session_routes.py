"""/v1/leyline/sessions/{id} on SGLang: what is held for a session, dropping it, editing it now.

Bodies, answers and errors are those of Leyline's own server. A session's id is the rest of the
path, slashes included: it is data, never a path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import TypeAdapter, ValidationError

from leyline.api.errors import FieldError
from leyline.api.leyline_object import PolicyReport, check_session, parse_leyline
from leyline.api.sessions import DropAnswer, EditRequest, SessionAnswer, parse_edit
from leyline.policy import Applied, PolicyError, apply_policy
from leyline.policy.errors import short
from leyline.sglang import asgi
from leyline.sglang.answers import OpenAI
from leyline.sglang.carriers import KEY, Ahead, check_enabled, is_enabled
from leyline.sglang.request import Exchange, Refused, only
from leyline.sglang.session_control import Question, ask
from leyline.sglang.targets import Target, target_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_PATH = "/v1/leyline/sessions/{session:path}"
_PARAMS = {
    # Of what the scheduler says about an edit, by its word.
    "source_missing": "session",
    "empty_prompt": "prompt",
    "context_length_exceeded": "prompt",
}
Endpoint = Callable[["Request", str], Awaitable[dict[str, Any]]]


def add_routes() -> None:
    """BEFORE `http_server._setup_and_run_http_server`: routes of SGLang's app, and so behind its
    API key."""
    from sglang.srt.entrypoints.http_server import app

    if any(getattr(each, "path", None) == _PATH for each in app.router.routes):
        return
    for method, path, endpoint in (
        ("POST", f"{_PATH}/directives", _edit),
        ("GET", _PATH, _show),
        ("DELETE", _PATH, _drop),
    ):
        app.router.add_route(path, _answering(endpoint), methods=[method])


def _answering(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        from starlette.exceptions import HTTPException
        from starlette.responses import Response

        try:
            check_enabled(is_enabled())
            session = check_session(request.path_params["session"])
            out = orjson.dumps(await endpoint(request, session))
            return Response(out, media_type="application/json")
        except FieldError as error:
            refused = Refused.of(error)
        except Refused as error:
            refused = error
        except HTTPException as error:
            refused = Refused(str(error.detail), error.status_code)
        body, headers = asgi.error_of(OpenAI(), refused)
        return Response(body, refused.status_code, headers)

    return answer


# -- shown and dropped ------------------------------------------------------------------------


async def _show(request: Request, session: str) -> dict[str, Any]:
    found = await ask(_manager(request), _question(request, session))
    if not found:
        raise _unknown(session)
    view = max(found, key=lambda each: each["cached"])  # of the ranks that have it
    return SessionAnswer(session=session, **view).model_dump()


async def _drop(request: Request, session: str) -> dict[str, Any]:
    scrub = _yes_or_no(request, "scrub")
    found = await ask(_manager(request), _question(request, session, drop=True, scrub=scrub))
    if not found:
        raise _unknown(session)
    return DropAnswer(
        session=session,
        dropped=True,
        freed=sum(each["freed"] for each in found),
        kept_by_others=sum(each["kept_by_others"] for each in found),
        scrubbed=scrub,
    ).model_dump()


def _question(request: Request, session: str, **more: bool) -> Question:
    where = request.query_params
    return Question(
        session, where.get("extra_key") or None, where.get("cache_salt") or None, **more
    )


def _yes_or_no(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false")
    try:
        return TypeAdapter(bool).validate_python(given)
    except ValidationError:
        raise FieldError(name, f"must be true or false, not {short(given)}.") from None


def _unknown(session: str) -> Refused:
    what = f"session {session!r} is unknown: never used in this namespace, dropped or flushed"
    return Refused(what, 404, "session", "session_not_found")


# -- edited now -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Whose rows, and which scheduler's: fields that SGLang's other routes have too."""

    extra_key: str | None = None
    cache_salt: str | None = None
    routed_dp_rank: int | None = None

    @classmethod
    def taken_from(cls, body: object) -> _Place:
        """Takes them out of the body. Raises FieldError."""
        if not isinstance(body, dict):
            return cls()
        given = {name: body.pop(name, None) for name in cls.__slots__}
        for name, kind in (("extra_key", str), ("cache_salt", str), ("routed_dp_rank", int)):
            if given[name] is not None and type(given[name]) is not kind:
                word = "text" if kind is str else "a number"
                raise FieldError(name, f"must be {word}, not {short(given[name])}.")
        return cls(**given)


async def _edit(request: Request, session: str) -> dict[str, Any]:
    """An ordinary request of SGLang's that generates nothing: it is queued, admitted, spliced and
    reported like any other. The one token that SGLang samples all the same is no part of what the
    session holds (cache.py)."""
    body = _json(await request.body())
    place = _Place.taken_from(body)
    options = parse_edit(body)
    names = ("mode", "repair", "directives", "strict", "scrub")
    given = {name: body[name] for name in names if isinstance(body, dict) and name in body}
    applied = await asyncio.to_thread(_apply_policy, options)
    target = await target_of(request.app.state.openai_serving_tokenize, options)
    ahead = Ahead.SOURCE if target is None else Ahead.PROMPT
    exchange = Exchange(parse_leyline({"session": session, **given}), ahead)
    await _run(request, exchange, options, place, target)
    assert exchange.report is not None, "an edit that was run has one"
    policy = [PolicyReport.of(each).model_dump() for each in applied]
    return {**exchange.report, "policy": policy}


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError as error:
        raise FieldError("", f"the body is not JSON: {error}", "invalid_json") from None


def _apply_policy(options: EditRequest) -> tuple[Applied, ...]:
    """Edits the messages."""
    if options.policy is None:
        return ()
    try:
        edited = apply_policy(options.policy, options.messages)
    except PolicyError as error:
        raise FieldError(error.field, error.message, "invalid_policy") from None
    options.messages = edited.messages
    return edited.applied


async def _run(
    request: Request, exchange: Exchange, options: EditRequest, place: _Place, target: Target | None
) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    chat = request.app.state.openai_serving_chat
    rank = chat.extract_routed_dp_rank_from_header(request, place.routed_dp_rank)
    asked = GenerateReqInput(
        input_ids=[0] if target is None else target.ids,  # the scheduler puts the source there
        sampling_params={"max_new_tokens": 0, "temperature": 0.0},
        extra_key=place.extra_key,
        cache_salt=place.cache_salt,
        routed_dp_rank=rank,
        routing_key=chat.extract_routing_key(request),
        lora_path=chat._resolve_lora_path(options.model, None) if options.model else None,
    )
    request.scope[KEY] = exchange
    try:
        answers = _manager(request).generate_request(asked, request)
        async with aclosing(answers):
            out = await only(answers)
    except Refused as error:
        raise _of_edit(error, target) from None
    except ValueError as error:
        raise Refused(str(error), 400, target.field if target else None) from None
    if out["meta_info"]["finish_reason"]["type"] == "abort":
        what = "the edit was ended before it was done: its session was dropped, or it was aborted"
        raise Refused(what, 409, code="aborted")


def _of_edit(error: Refused, target: Target | None) -> Refused:
    """What the scheduler says of a `leyline` object; here its fields are the body's own."""
    param = (error.param or "").removeprefix(f"{KEY}.") or _PARAMS.get(error.code or "")
    if param is None and target is not None:
        param = target.field
    message = error.message.removeprefix(f"{KEY}.")
    return Refused(message, error.status_code, param, error.code or "")


def _manager(request: Request) -> Any:
    return request.app.state.openai_serving_chat.tokenizer_manager

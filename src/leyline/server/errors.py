"""Every error, as the OpenAI API has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from leyline.api.errors import FieldError, join
from leyline.api.openai_answers import ErrorAnswer, Problem
from leyline.channel import EngineError, Fallback, StrictFallback
from leyline.directive import DirectiveError
from leyline.policy import PolicyError

INVALID = "invalid_request_error"
SERVER = "server_error"
_TRY_AGAIN = {"Retry-After": "1"}
_DONT_RETRY = {"x-should-retry": "false"}  # the official clients retry a 409 otherwise


@dataclass
class ApiError(Exception):
    """An error on its way to the client."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The error object; what came from a stranger may not be encodable."""
        problem = Problem(
            message=_clean(self.message),
            type=self.type,
            param=None if self.param is None else _clean(self.param),
            code=self.code,
        )
        return ErrorAnswer(error=problem).model_dump_json().encode()

    def response(self) -> Response:
        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )


def as_api_error(error: Exception) -> ApiError:
    """Any error, translated."""
    match error:
        case ApiError():
            return error
        case FieldError() as e:
            return ApiError(400, str(e), param=e.field or None, code=e.code)
        case DirectiveError() as e:
            return ApiError(400, str(e), param=e.field, code="invalid_directive")
        case PolicyError() as e:
            return ApiError(400, str(e), param=e.field, code="invalid_policy")
        case EngineError() as e:
            return _of_engine(e)
        case HTTPException(status_code=status, detail=detail):
            kind = INVALID if status < 500 else SERVER
            headers = dict(error.headers or {})
            return ApiError(status, f"{detail}", kind, code=_word(status), headers=headers)
        case RequestValidationError():
            flaw = error.errors()[0]
            name = str(flaw["loc"][-1])
            return ApiError(400, f"{name}: {flaw['msg']}.", param=name, code="invalid_value")
    what = f"the server failed on this request ({type(error).__name__}); its log says more"
    return ApiError(500, what, SERVER, code="internal_error")


def _of_engine(error: EngineError) -> ApiError:
    reason = str(error.reason)
    if isinstance(error, StrictFallback):
        return ApiError(409, error.message, param="strict", code=reason, headers=_DONT_RETRY)
    match reason:
        case "context_length_exceeded" | "empty_prompt" | "bad_prompt" | "unknown_token":
            return ApiError(400, error.message, param="prompt", code=reason)
        case "bad_sampling":
            return ApiError(400, error.message, code=reason)
        case Fallback.SOURCE_MISSING:
            return ApiError(404, error.message, param="session", code=reason)
        case "queue_full" | "no_room" | "closing":
            return ApiError(503, error.message, SERVER, code=reason, headers=_TRY_AGAIN)
        case "aborted":
            return ApiError(409, error.message, code=reason, headers=_DONT_RETRY)
    return ApiError(500, error.message, SERVER, code=reason)


def named(error: Exception, prefix: str, prompt: str = "prompt") -> ApiError:
    """Like `as_api_error`, for a request whose edits stand under `prefix` and whose prompt came in
    the field `prompt`."""
    if isinstance(error, DirectiveError | PolicyError):
        code = "invalid_directive" if isinstance(error, DirectiveError) else "invalid_policy"
        where = error.field
        if not where.startswith("messages"):
            where = join(prefix, where)
        return as_api_error(FieldError(where, error.message, code))
    out = as_api_error(error)
    if isinstance(error, EngineError):
        out.param = prompt if out.param == "prompt" else out.param and join(prefix, out.param)
    return out


def install(app: FastAPI) -> None:
    """Have `app` answer every error like this."""

    async def answer(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    kinds: list[type[Exception]] = [
        ApiError,
        FieldError,
        DirectiveError,
        PolicyError,
        EngineError,
        HTTPException,
        RequestValidationError,
        Exception,
    ]
    add: Callable[[type[Exception], Callable], None] = app.add_exception_handler
    for kind in kinds:
        add(kind, answer)


def _word(status: int) -> str | None:
    return {404: "not_found", 405: "method_not_allowed"}.get(status)


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

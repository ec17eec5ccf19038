"""Every error, as the OpenAI API has it; under /v1/messages as Anthropic's has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leyline.api.anthropic_answers import AnthropicError, AnthropicProblem
from leyline.api.errors import FieldError, join
from leyline.api.openai_answers import ErrorAnswer, Problem
from leyline.channel import EngineError, Fallback, StrictFallback
from leyline.directive import DirectiveError
from leyline.policy import PolicyError

INVALID = "invalid_request_error"
SERVER = "server_error"
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    # What Anthropic's API calls an error of a status.
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
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

    def anthropic_body(self) -> bytes:
        """The error object of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, INVALID if self.status < 500 else "api_error")
        problem = AnthropicProblem(type=kind, message=_clean(self.message))
        return AnthropicError(error=problem).model_dump_json().encode()

    def response(self) -> Response:
        return ErrorResponse(self)


class ErrorResponse(Response):
    """An error in the shape that the clients of the path expect."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error
        anthropic = f"{scope['path']}/".startswith(f"{_ANTHROPIC_PATH}/")
        body = error.anthropic_body() if anthropic else error.body()
        answer = Response(body, error.status, error.headers, media_type="application/json")
        await answer(scope, receive, send)


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

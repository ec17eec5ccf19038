"""A malformed request, as one sentence that names the field and the value."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from leyline.policy.errors import short

Model = TypeVar("Model", bound=BaseModel)


class FieldError(ValueError):
    """A bad field: `field` is where (`leyline.directives[0].end`), `message` a sentence, `code` one
    word for programs."""

    def __init__(self, field: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message
        self.code = code


def parse(model: type[Model], obj: object, field: str = "") -> Model:
    """`obj` as `model`. Raises FieldError for its first flaw; `field` is where `obj` stands."""
    if not isinstance(obj, dict):
        raise FieldError(field or "body", f"must be an object, not {short(obj)}.")
    try:
        return model.model_validate(obj)
    except ValidationError as error:
        raise _first(error, model, field) from None


def join(*parts: str) -> str:
    """Field names as one path, without the empty ones."""
    return ".".join(part for part in parts if part)


def _first(error: ValidationError, model: type[BaseModel], field: str) -> FieldError:
    flaw = error.errors(include_url=False)[0]
    where = join(field, _path(flaw["loc"]))
    cause = flaw.get("ctx", {}).get("error")
    if cause is not None and hasattr(cause, "field"):
        # Raised by a model as a whole: its field is seen from there.
        code = getattr(cause, "code", "invalid_directive")
        return FieldError(join(where, cause.field), cause.message, code)
    if flaw["type"] == "missing":
        return FieldError(where, "is missing.", "missing_required_parameter")
    if flaw["type"] == "extra_forbidden":
        return FieldError(where, f"is no field here{_allowed(model, flaw)}.", "unknown_parameter")
    what = str(flaw["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    return FieldError(where, f"must be {what}, not {short(flaw['input'])}.")


def _allowed(model: type[BaseModel], flaw: Any) -> str:
    if len(flaw["loc"]) > 1:
        return ""
    return f"; there are {', '.join(model.model_fields)}"


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:60]}"
    return path.lstrip(".")

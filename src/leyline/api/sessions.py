"""Bodies of `/v1/leyline/sessions`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator

from leyline.api.errors import FieldError, parse
from leyline.api.leyline_object import EditOptions
from leyline.api.messages import check_messages, check_tools
from leyline.api.openai import check_prompt, check_template_kwargs


class EditRequest(EditOptions):
    """Edits to apply now: directives, or what the session's sequence is to become."""

    model: str | None = None
    prompt: Any = None
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_target(self) -> EditRequest:
        if self.messages is None:
            for name in ("policy", "tools", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise FieldError(name, "goes with messages only, and there are none.")
        else:
            if self.prompt is not None:
                raise FieldError("prompt", "and messages are two targets; give one of them.")
            self.messages = check_messages(self.messages)
            self.tools = check_tools(self.tools)
            check_template_kwargs(self.chat_template_kwargs or {})
        if self.prompt is not None:
            self.prompt = check_prompt(self.prompt)
        if self.prompt is None and self.messages is None and self.directives is None:
            raise FieldError("directives", "is missing; give directives, messages or a prompt.")
        return self


def parse_edit(body: object) -> EditRequest:
    """The body of POST …/directives from untrusted data. Raises FieldError."""
    return parse(EditRequest, body)


class Segment(BaseModel):
    """Rows of one provenance. exact: computed over exactly the tokens now before them. rotations:
    how often they were turned since."""

    start: int
    tokens: int
    exact: bool
    rotations: int


class SessionAnswer(BaseModel):
    """What is held for a session.

    tokens: of its sequence; `cached` of them have rows now, the first `exact` are as a prefill
    gives them. edits: applied so far. age_s: seconds since its first request.
    """

    session: str
    tokens: int
    cached: int
    exact: int
    edits: int
    max_rotations: int
    age_s: float
    segments: list[Segment]


class DropAnswer(BaseModel):
    """What dropping a session came to. freed: rows. kept_by_others: rows that others use too."""

    session: str
    dropped: bool
    freed: int
    kept_by_others: int
    scrubbed: bool

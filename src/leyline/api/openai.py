"""Requests of the OpenAI API, as far as they are served.

A field that is not supported and would change the answer is refused, never ignored; so is an
unknown one inside `leyline`. Other unknown fields are ignored, as other servers of this API do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from leyline.api.errors import FieldError, parse
from leyline.api.leyline_object import LeylineObject, parse_leyline
from leyline.api.messages import Message, check_messages, check_tools
from leyline.directive import to_tokens
from leyline.policy.errors import short

MAX_STOPS = 4
_SEED = 2**63

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # Each with the values that change nothing; null always is one.
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    # of other servers of this API
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "prompt_logprobs": (0,),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": ("",),
    "json_schema": (),
    "regex": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
}

TEMPLATE_RESERVED = (
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
"""Not to be set by `chat_template_kwargs`."""

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class Common(BaseModel):
    """What chat and text completions have in common. None is "not given"."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-_SEED, lt=_SEED)] | None = None
    stop: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    leyline: Any = None

    @model_validator(mode="after")
    def _check(self) -> Common:
        self.stop = _stops(self.stop)
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def channel(self) -> LeylineObject | None:
        """The checked `leyline` object."""
        return self.leyline

    @property
    def limit(self) -> int | None:
        """Tokens that the answer may have; None for as many as fit."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Log-probabilities beside the chosen token's; None for none at all."""
        raise NotImplementedError


class ChatRequest(Common):
    messages: Any = None
    tools: Any = None
    tool_choice: str | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        self.messages = check_messages(self.messages)
        self.tools = check_tools(self.tools)
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise FieldError("max_tokens", f"{both[0]} is not max_completion_tokens, {both[1]}.")
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", f"{self.top_logprobs} needs logprobs to be true.")
        check_template_kwargs(self.chat_template_kwargs or {})
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def conversation(self) -> list[Message]:
        return self.messages

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return kwargs

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools to tell the model of."""
        return None if self.tool_choice == "none" else self.tools or None


class CompletionRequest(Common):
    prompt: Any = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> CompletionRequest:
        self.prompt = check_prompt(self.prompt)
        return self

    @property
    def limit(self) -> int | None:
        given = "max_tokens" in self.model_fields_set and self.max_tokens is not None
        return self.max_tokens if given else 16  # as the API has it

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


R = TypeVar("R", bound=Common)


def parse_chat(body: object) -> ChatRequest:
    """A chat request from untrusted data. Raises FieldError."""
    return with_leyline(parse(ChatRequest, supported(body, UNSUPPORTED)))


def parse_completion(body: object) -> CompletionRequest:
    """A completion request from untrusted data. Raises FieldError."""
    request = with_leyline(parse(CompletionRequest, supported(body, UNSUPPORTED)))
    if request.channel is not None and request.channel.policy is not None:
        raise FieldError("leyline.policy", "edits messages, and a completion has none.")
    return request


def check_prompt(prompt: object, field: str = "prompt") -> str | list[int]:
    """One prompt, text or token ids, maybe in a list of its own. Raises FieldError."""
    if isinstance(prompt, str):
        return prompt
    if prompt is None:
        raise FieldError(field, "is missing.", "missing_required_parameter")
    if not isinstance(prompt, list) or not prompt:
        raise FieldError(field, f"must be text or a list of token ids, not {short(prompt)}.")
    if isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            what = f"{len(prompt)} prompts in one request are not supported; send one request each."
            raise FieldError(field, what, "unsupported_parameter")
        return check_prompt(prompt[0], f"{field}[0]")
    return to_tokens(prompt, field).tolist()


def check_template_kwargs(kwargs: Mapping[str, Any], field: str = "chat_template_kwargs") -> None:
    """Refuse what is not the chat template's. Raises FieldError."""
    for key in kwargs:
        if key in TEMPLATE_RESERVED:
            raise FieldError(f"{field}.{key}", "is not for the chat template to take.")


def with_leyline(request: R) -> R:
    """The request, its `leyline` object checked. Raises FieldError."""
    if request.leyline is not None:
        request.leyline = parse_leyline(request.leyline)
    return request


def supported(body: object, unsupported: Mapping[str, tuple[object, ...]]) -> object:
    """The body, if it asks for nothing that would have to be ignored. Raises FieldError.

    unsupported: fields, each with the values that change nothing.
    """
    if not isinstance(body, dict):
        return body
    for name, neutral in unsupported.items():
        value = body.get(name)
        if value is None or any(_same(value, each) for each in neutral):
            continue
        instead = " or ".join(["leave it out", *(f"give {each!r}" for each in neutral[:1])])
        raise FieldError(
            name, f"{short(value)} is not supported; {instead}.", "unsupported_parameter"
        )
    return body


def _same(value: object, neutral: object) -> bool:
    """Equal, and not only as 1 and True are."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _stops(given: object) -> tuple[str, ...]:
    if given is None:
        return ()
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list):
        raise FieldError("stop", f"must be text or a list of it, not {short(given)}.")
    if len(stops) > MAX_STOPS:
        raise FieldError("stop", f"may be up to {MAX_STOPS} strings, not {len(stops)}.")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            where = "stop" if isinstance(given, str) else f"stop[{i}]"
            raise FieldError(where, f"must be text of at least a character, not {short(stop)}.")
    return tuple(stops)

"""What a server has at hand, and a checked request in the engine's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pydantic_core

from leyline.api.errors import FieldError
from leyline.api.messages import Message
from leyline.api.openai import Common
from leyline.engine.engine import Engine
from leyline.engine.request import Sampling
from leyline.policy import Edited, PolicyError, apply_policy
from leyline.policy.errors import short
from leyline.server.errors import ApiError, named
from leyline.server.inspect.records import Records
from leyline.server.limits import Settings
from leyline.server.metrics import Metrics
from leyline.server.text import Text

_COLDEST = 1e-4
"""Temperatures below it are greedy: logits divided by it would overflow."""
_SMALLEST_TOP_P = 1e-6


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling of a request that doesn't say: the model's generation config, where that has a
    value, else the API's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, engine: Engine) -> Defaults:
        config = getattr(engine.model, "generation_config", None)
        given = config.to_diff_dict() if config is not None else {}  # only what was set
        known = {name: given[name] for name in cls.__slots__ if given.get(name) is not None}
        return cls(**known)


@dataclass(frozen=True, slots=True)
class State:
    """What the routes work with."""

    engine: Engine
    settings: Settings
    text: Text
    metrics: Metrics
    defaults: Defaults
    records: Records
    started: int
    """Unix time."""


def load(body: bytes) -> object:
    """The body as JSON. Raises FieldError."""
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise FieldError("", f"the body is not JSON: {error}", "invalid_json") from error


def check_model(name: str | None, engine: Engine) -> None:
    """Raises ApiError 404 for a model that is not served. None is the one that is."""
    if name is not None and name != engine.name:
        what = f"model {short(name)} does not exist here, this server has {engine.name!r}"
        raise ApiError(404, what, param="model", code="model_not_found")


def edited(policy: Any, messages: list[Message], text: Text, prefix: str) -> Edited:
    """The messages as the request's policy leaves them; all of them without one. Raises ApiError;
    prefix: the field that the policy stands in."""
    if policy is None:
        return Edited.nothing(messages)
    try:
        return apply_policy(policy, messages, text.count)
    except PolicyError as error:
        raise named(error, prefix) from error


def sampling_of(request: Common, defaults: Defaults) -> Sampling:
    """How the answer is to be drawn."""
    temperature = _or(request.temperature, defaults.temperature)
    return Sampling(
        max_tokens=request.limit,
        temperature=temperature if temperature >= _COLDEST else 0.0,
        top_p=max(_or(request.top_p, defaults.top_p), _SMALLEST_TOP_P),
        top_k=max(0, int(_or(request.top_k, defaults.top_k))),
        seed=request.seed,
        stop=request.stop,
        logprobs=request.alternatives,
        ignore_eos=bool(request.ignore_eos),
    )


def _or(given: float | None, default: float) -> float:
    return default if given is None else given

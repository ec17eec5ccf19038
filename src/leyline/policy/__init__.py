"""Policies: messages in, edited messages out. Pure functions, known to requests by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leyline.policy.errors import PolicyError, short
from leyline.policy.tools import PLACEHOLDER, clear_tool_outputs

__all__ = ["PLACEHOLDER", "POLICIES", "PolicyError", "apply_policy", "clear_tool_outputs"]

POLICIES: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "clear_tool_outputs": clear_tool_outputs,
}


def apply_policy(
    spec: Mapping[str, Any], messages: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Apply the policy that an untrusted ``spec`` names, e.g. ``{"name": …, "keep": 2}``.

    All fields but ``name`` are the policy's own options. Raises PolicyError, whose ``field``
    is a path like ``policy.keep``, and changes nothing.
    """
    if not isinstance(spec, Mapping):
        raise PolicyError("policy", f"must be an object, not {short(spec)}.")
    if "name" not in spec:
        raise PolicyError("policy.name", f"is missing; one of {_listed(POLICIES)}.")
    name = spec["name"]
    if not isinstance(name, str) or name not in POLICIES:
        raise PolicyError("policy.name", f"must be one of {_listed(POLICIES)}, not {short(name)}.")
    policy = POLICIES[name]
    options = {key: value for key, value in spec.items() if key != "name"}
    known = list(inspect.signature(policy).parameters)[1:]
    for key in options:
        if key not in known:
            where = f"policy.{str(key)[:60]}"
            raise PolicyError(where, f"is not an option of {name}, which has {_listed(known)}.")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise PolicyError(f"messages[{i}]", f"must be an object, not {short(message)}.")
    return policy(messages, **options)


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(names)

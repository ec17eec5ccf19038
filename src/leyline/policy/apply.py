"""Policies by name, from untrusted data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from leyline.policy.base import Edited, Policy, Step, fold, own
from leyline.policy.errors import PolicyError, short
from leyline.policy.failed_calls import drop_failed_calls
from leyline.policy.hitters import heavy_hitters
from leyline.policy.look import Count, estimate
from leyline.policy.stale_reads import drop_stale_reads
from leyline.policy.thinking import clear_thinking
from leyline.policy.tool_outputs import clear_tool_outputs
from leyline.policy.turns import Message
from leyline.policy.window import keep_window

GROUP = "leyline.policies"
"""Entry points of this group are policies of one's own: functions, or Policy objects."""

BUILT_IN = {
    each.name: each
    for each in (
        clear_tool_outputs,
        clear_thinking,
        drop_failed_calls,
        drop_stale_reads,
        keep_window,
        heavy_hitters,
    )
}
MAX_POLICIES = 16
_log = logging.getLogger(__name__)

Spec = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@cache
def policies() -> dict[str, Policy]:
    """All policies by name: Leyline's, then installed ones, which can't take the name of those.
    One that can't be loaded is left out, with a line in the log."""
    found = dict(BUILT_IN)
    for each in entry_points(group=GROUP):
        if each.name in found:
            continue
        try:
            loaded = each.load()
            found[each.name] = loaded if isinstance(loaded, Policy) else own(each.name, loaded)
        except Exception as error:  # somebody else's code
            _log.warning("policy %s (%s) can't be loaded: %s", each.name, each.value, error)
    return found


def apply_policy(spec: Spec, messages: Sequence[Message], count: Count = estimate) -> Edited:
    """The messages as a policy, or a list of them in order, leaves them; untrusted data.

    spec: `{"name": …}` with the policy's options, e.g. `{"name": "clear_tool_outputs", "keep": 2}`.
    count: tokens of a text, for triggers, budgets and the report. Raises PolicyError, whose `field`
    is a path like `policy.keep` or `policy[1].keep`, before anything is done. Neither the messages
    nor the list are changed.
    """
    steps = _steps(spec)
    return fold(steps, messages, count)


def _steps(spec: object) -> list[Step]:
    if isinstance(spec, Mapping):
        return [_step(spec, "policy")]
    if not isinstance(spec, list | tuple):
        raise PolicyError("policy", f"must be an object or a list of them, not {short(spec)}.")
    if len(spec) > MAX_POLICIES:
        raise PolicyError("policy", f"may be up to {MAX_POLICIES}, not {len(spec)}.")
    return [_step(each, f"policy[{i}]") for i, each in enumerate(spec)]


def _step(spec: object, where: str) -> Step:
    if not isinstance(spec, Mapping):
        raise PolicyError(where, f"must be an object, not {short(spec)}.")
    known = policies()
    listed = ", ".join(known)
    if "name" not in spec:
        raise PolicyError(f"{where}.name", f"is missing; one of {listed}.")
    name = spec["name"]
    if not isinstance(name, str) or name not in known:
        raise PolicyError(f"{where}.name", f"must be one of {listed}, not {short(name)}.")
    options = {key: value for key, value in spec.items() if key != "name"}
    known[name].check(options, where)
    return Step(known[name], options, where)

"""Policies: messages in, edited messages out. Pure functions, known to requests by name."""

from leyline.policy.apply import BUILT_IN, Spec, apply_policy, policies
from leyline.policy.base import Applied, Edited, Policy, policy
from leyline.policy.errors import PolicyError
from leyline.policy.failed_calls import drop_failed_calls
from leyline.policy.hitters import heavy_hitters
from leyline.policy.look import Count, Look, estimate
from leyline.policy.stale_reads import drop_stale_reads
from leyline.policy.thinking import clear_thinking
from leyline.policy.tool_outputs import PLACEHOLDER, clear_tool_outputs
from leyline.policy.window import keep_window

__all__ = [
    "BUILT_IN",
    "PLACEHOLDER",
    "Applied",
    "Count",
    "Edited",
    "Look",
    "Policy",
    "PolicyError",
    "Spec",
    "apply_policy",
    "clear_thinking",
    "clear_tool_outputs",
    "drop_failed_calls",
    "drop_stale_reads",
    "estimate",
    "heavy_hitters",
    "keep_window",
    "policies",
    "policy",
]

"""`python -m leyline.policy`: the policies, their options, and what they free on recorded sessions,
as Markdown."""

from __future__ import annotations

import json
from typing import Any

from leyline.policy.apply import BUILT_IN, apply_policy
from leyline.policy.base import Policy
from leyline.policy.look import estimate, texts_of
from leyline.traces import Session, calls, load_traces

SPECS: tuple[dict[str, Any], ...] = (
    {"name": "clear_tool_outputs"},
    {"name": "clear_tool_outputs", "trigger_tokens": 5000, "at_least": 1000},
    {"name": "clear_thinking"},
    {"name": "drop_failed_calls"},
    {"name": "drop_failed_calls", "same": "program"},
    {"name": "drop_stale_reads"},
    {"name": "keep_window", "newest": 2000},
)
"""What is measured. `heavy_hitters` needs attention, which no recording has."""


def options_of(policy: Policy) -> str:
    """A table of a policy's options."""
    rows = ["| option | is | default | for |", "| --- | --- | --- | --- |"]
    for option in policy.options:
        default = "required" if option.required else f"`{_json(option.default)}`"
        rows.append(f"| `{option.name}` | {option.kind.says} | {default} | {option.what} |")
    return "\n".join(rows)


def freed(sessions: list[Session]) -> str:
    """A table of what each of SPECS frees in the last prompt of each session, all together."""
    prompts = [call.messages for call in (list(calls(session))[-1] for session in sessions)]
    everything = (message for prompt in prompts for message in prompt)
    total = sum(estimate(text) for message in everything for text in texts_of(message))
    rows = [
        "| policy | tool uses | messages dropped | tokens freed | of all |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for spec in SPECS:
        done = [apply_policy(spec, prompt).applied[0] for prompt in prompts]
        uses, messages, tokens = (
            sum(getattr(each, name) for each in done)
            for name in ("tool_uses", "messages", "tokens")
        )
        rows.append(
            f"| `{_json(spec)}` | {uses:,} | {messages:,} | {tokens:,} | {tokens / total:.1%} |"
        )
    return "\n".join(rows)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> None:
    """Print it all."""
    for name, policy in BUILT_IN.items():
        print(f"## {name}\n\n{options_of(policy)}\n")
    print(f"## Freed\n\n{freed(load_traces())}")


if __name__ == "__main__":
    main()

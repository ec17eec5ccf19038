"""The same with Anthropic's SDK: old tool results are cleared by its own `context_management`, and
what stands behind them stays cached.

    leyline serve                                    # or SGLang with the plugin
    python examples/anthropic_loop.py README.md docs/*.md
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anthropic import Anthropic

from leyline.client import Session, report_of  # Leyline

CLEAR = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 2},
    "keep": {"type": "tool_uses", "value": 2},
}


def main(files: list[str], url: str, model: str) -> None:
    client = Anthropic(base_url=url, api_key="none")
    session = Session()  # Leyline
    messages: list[Any] = []
    for number, file in enumerate(files):
        messages += read(file, f"call_{number}")
        answer = client.beta.messages.create(
            model=model,
            system="Say in a sentence what a file is about.",
            messages=messages,
            max_tokens=24,
            betas=["context-management-2025-06-27"],
            context_management={"edits": [CLEAR]},
            **session.options(),  # Leyline
        )
        said = "".join(block.text for block in answer.content if block.type == "text")
        messages.append({"role": "assistant", "content": said or "…"})
        cleared = answer.context_management.applied_edits if answer.context_management else []
        print(f"{file}: {said!r}\n  cached {answer.usage.cache_read_input_tokens}, {cleared}")
        print(f"  {report_of(answer)}")  # Leyline


def read(file: str, call: str) -> list[Any]:
    """The tool: what the model asked for, and what it got."""
    text = Path(file).read_text(errors="replace")[:3000]
    use = {"type": "tool_use", "id": call, "name": "read", "input": {"file": file}}
    result = {"type": "tool_result", "tool_use_id": call, "content": text}
    return [
        {"role": "user", "content": f"What is {file} about?"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    main(given.files, given.url.rstrip("/").removesuffix("/v1"), given.model)

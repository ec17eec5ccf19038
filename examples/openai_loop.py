"""Read files one after the other and say a sentence about each, as an agent does; what an old file
said is cleared from the context as it goes.

    leyline serve                                    # or SGLang with the plugin
    python examples/openai_loop.py README.md docs/*.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from openai import OpenAI

from leyline.client import Session, report_of  # Leyline


def main(files: list[str], url: str, model: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    session = Session(policy={"name": "clear_tool_outputs", "keep": 2})  # Leyline
    messages: list[Any] = [{"role": "system", "content": "Say in a sentence what a file is about."}]
    for file in files:
        messages += read(file)
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=24,
            **session.options(),  # Leyline
        )
        said = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        tokens = report_of(answer)  # Leyline
        print(f"{file}: {said!r}\n  {tokens}")


def read(file: str) -> list[Any]:
    """The tool: what the model asked for, and what it got."""
    call = {"name": "read", "arguments": json.dumps({"file": file})}
    text = Path(file).read_text(errors="replace")[:3000]
    asked = {"role": "assistant", "content": "", "tool_calls": [
        {"id": file, "type": "function", "function": call}
    ]}  # fmt: skip
    user = {"role": "user", "content": f"What is {file} about?"}
    return [user, asked, {"role": "tool", "tool_call_id": file, "content": text}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    main(given.files, given.url.rstrip("/").removesuffix("/v1"), given.model)

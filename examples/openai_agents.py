"""OpenAI's Agents SDK with its own trimmer, which shortens the tool outputs of older turns in a
copy of the conversation at every call. Leyline finds the edits; all it needs is the session's name.

    python examples/openai_agents.py README.md docs/*.md

Wants a server that parses tool calls (docs/examples.md) and `pip install "leyline-kv[agents]"`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
)
from agents.extensions import ToolOutputTrimmer
from openai import AsyncOpenAI

from leyline.client import Session  # Leyline


@function_tool
def read(file: str) -> str:
    """The beginning of a file."""
    return Path(file).read_text(errors="replace")[:3000]


def main(files: list[str], url: str, model: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    agent = Agent(
        name="reader",
        instructions="Read the file, then say in a sentence what it is about.",
        tools=[read],
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
        model_settings=ModelSettings(
            max_tokens=200,
            **Session().options(),  # Leyline
        ),
    )
    # A trace would be sent to OpenAI.
    config = RunConfig(
        tracing_disabled=True,
        call_model_input_filter=ToolOutputTrimmer(recent_turns=2, preview_chars=0),
    )
    said: list[Any] = []
    for file in files:
        said.append({"role": "user", "content": f"What is {file} about?"})
        result = Runner.run_sync(agent, said, run_config=config)
        said = result.to_input_list()
        print(f"{file}: {result.final_output!r}")
        for usage in (response.usage for response in result.raw_responses):
            print(f"  cached {usage.input_tokens_details.cached_tokens} of {usage.input_tokens}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="default")
    main(**vars(parser.parse_args()))

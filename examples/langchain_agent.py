"""LangChain's agent with its own context editing, which clears old tool outputs in a copy of the
messages at every call. Leyline finds the edits; all it needs is the session's name.

    python examples/langchain_agent.py README.md docs/*.md

Wants a server that parses tool calls (docs/examples.md) and `pip install "leyline-kv[agents]"`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from langchain.agents import create_agent
from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from leyline.client import Session  # Leyline


@tool
def read(file: str) -> str:
    """The beginning of a file."""
    return Path(file).read_text(errors="replace")[:3000]


def main(files: list[str], url: str, model: str) -> None:
    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=model,
        max_tokens=200,
        **Session().options(),  # Leyline
    )
    # Counted roughly, with four characters for a token.
    clear = ClearToolUsesEdit(trigger=1500, keep=2)
    agent = create_agent(
        chat,
        tools=[read],
        system_prompt="Read one file after the other, then say in a sentence what each is about.",
        middleware=[ContextEditingMiddleware(edits=[clear])],
    )
    asked = {"role": "user", "content": f"What are these about? {' '.join(files)}"}
    for message in agent.invoke({"messages": [asked]})["messages"]:
        if isinstance(message, AIMessage) and message.usage_metadata:
            usage = message.usage_metadata
            print([call["args"] for call in message.tool_calls] or message.text)
            cached = usage["input_token_details"].get("cache_read", 0)
            print(f"  cached {cached} of {usage['input_tokens']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="default")
    main(**vars(parser.parse_args()))

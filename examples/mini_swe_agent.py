"""mini-swe-agent, which never edits what was said: here the server clears old outputs of commands.

    python examples/mini_swe_agent.py README.md docs/*.md

The model's commands run on this machine, with nothing around them: mini-swe-agent has environments
for containers, too. Wants a server that parses tool calls (docs/examples.md) and
`pip install "leyline-kv[agents]"`.
"""

from __future__ import annotations

import argparse
import os

# LiteLLM would fetch a list of prices when it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from leyline.client import Session, report_of  # Leyline

# It has no price for this model, and would say so at every call.
litellm.suppress_debug_info = True

SYSTEM = """\
You work in a shell. Call the tool bash with one command at a time. When all is done, run
`echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo YOUR ANSWER`."""


def main(files: list[str], url: str, model: str) -> None:
    policy = {"name": "clear_tool_outputs", "keep": 2}  # Leyline
    chat = LitellmModel(
        model_name=f"openai/{model}",
        cost_tracking="ignore_errors",
        model_kwargs={
            "api_base": f"{url}/v1",
            "api_key": "none",
            "max_tokens": 200,
            **Session(policy=policy).options(),  # Leyline
        },
    )
    agent = DefaultAgent(
        chat,
        LocalEnvironment(),
        system_template=SYSTEM,
        instance_template="{{ task }}",
        step_limit=2 * len(files) + 2,
    )
    names = " ".join(files)
    done = agent.run(f"Read the beginning of each of these, and say what it is about: {names}")
    for message in agent.messages:
        extra = message.get("extra", {})
        if answer := extra.get("response"):
            print([action["command"] for action in extra.get("actions", [])])
            usage = answer["usage"]
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
            print(f"  cached {cached} of {usage['prompt_tokens']}")
            print(f"  {report_of(answer)}")  # Leyline
    print(done["exit_status"], done["submission"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="default")
    main(**vars(parser.parse_args()))

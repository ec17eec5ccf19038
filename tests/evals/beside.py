"""Stand-ins for debug-gym's process, where a test is about what is on this side."""

from __future__ import annotations

import sys
from pathlib import Path

ASKS = """
import json, sys
job = json.loads(sys.stdin.readline())
def put(kind, value):
    print(json.dumps({kind: value}), flush=True)
put("ready", {"debug_gym": "0", "python": "3", "digest": "d"})
messages = [{"role": "system", "content": job["system_prompt"]}, {"role": "user", "content": "Go."}]
for turn in range(4):
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    put("ask", {"model": "any", "messages": messages, "tools": tools, "tool_choice": "auto"})
    reply = json.loads(sys.stdin.readline())
    if "stop" in reply:
        put("done", {"resolved": False, "reason": reply["stop"]})
        sys.exit()
    content = reply["answer"]["choices"][0]["message"]["content"] or ""
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
    output = f"{turn} of {job['task']}: " + "bar tin " * 40
    messages.append({"role": "tool", "tool_call_id": "c", "name": "bash", "content": output})
put("done", {"resolved": True, "reason": "solved", "score": 1, "max_score": 1})
"""
"""An agent that asks four times, with a tool's output after each answer."""


def fake(tmp_path: Path, code: str) -> Path:
    """A Python that runs `code` in place of the child; the real one gets `-I`, then the file."""
    script = tmp_path / "python"
    body = tmp_path / "body.py"
    body.write_text(code)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{body}"\n')
    script.chmod(0o755)
    return script

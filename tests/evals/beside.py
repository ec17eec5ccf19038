"""Stand-ins for debug-gym's process, where a test is about what is on this side."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


LINGERS = """
import json, subprocess, sys, time
job = json.loads(sys.stdin.readline())
wait = [sys.executable, "-c", "import time; time.sleep(600)"]
left = [subprocess.Popen(wait), subprocess.Popen(wait, start_new_session=True)]
pids = " ".join(str(each.pid) for each in left)
print(json.dumps({"ask": {"messages": [{"role": "user", "content": pids}]}}), flush=True)
time.sleep(600)
"""
"""One that asks once and leaves two processes behind, one in a session of its own; says which."""


def lingering(body: dict[str, Any]) -> list[int]:
    """The processes that LINGERS names where it asks."""
    return [int(pid) for pid in body["messages"][0]["content"].split()]


def runs(pid: int) -> bool:
    """Whether a process is there, and not only waiting to be reaped; where there is /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ended(pids: Sequence[int]) -> bool:
    """Whether these were killed; they may not be dead yet."""
    deadline = time.monotonic() + 30
    while left := any(map(runs, pids)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return not left


def fake(tmp_path: Path, code: str) -> Path:
    """A Python that runs `code` in place of the child; the real one gets `-I`, then the file."""
    script = tmp_path / "python"
    body = tmp_path / "body.py"
    body.write_text(code)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{body}"\n')
    script.chmod(0o755)
    return script

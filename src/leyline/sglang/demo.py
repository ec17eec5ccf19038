"""`make sglang-demo`: a recorded agent session against real SGLang on the CPU, served twice.

As in the embedded engine's demo, all but the newest tool outputs are replaced by a stub as the
session goes on. Once the client does that and sends plain requests, for which SGLang has its prefix
cache; once it names a session and leaves the stubs to the server's policy.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from leyline.demo import KEEP, SESSION, find_session
from leyline.policy import clear_tool_outputs
from leyline.sglang.bench.server import Server
from leyline.sglang.cpu.checkpoint import write_tiny
from leyline.traces import Call, Session, calls

ARMS = ("prefix cache", "Leyline")
CALLS = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """What one model call cost: tokens, and seconds to the first token."""

    prompt: int
    cached: int
    moved: int
    seconds: float


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="leyline.sglang.demo", description=__doc__)
    parser.add_argument("--model", choices=["smollm2", "mla", "both"], default="both")
    parser.add_argument("--session", default=SESSION, help="id of a recorded session")
    parser.add_argument("--calls", type=int, default=CALLS, help="its first so many model calls")
    parser.add_argument("--json", type=Path, help="write all turns there")
    given = parser.parse_args(args)
    if given.calls < 1:
        parser.error("argument --calls: at least one")
    if find_spec("sglang") is None:
        sys.exit("SGLang is not installed here: pip install 'leyline-kv[sglang]'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with this process
    try:
        found = show(given.model, find_session(given.session), given.calls)
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    except KeyboardInterrupt:
        sys.exit(130)
    except (ImportError, OSError, RuntimeError, ValueError) as trouble:
        sys.exit(f"leyline.sglang.demo: {trouble}")


def show(which: str, session: Session, n: int) -> dict[str, Any]:
    """Print a table for each model; every turn's numbers, by model and arm."""
    console = Console()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="leyline-demo-") as folder:
        for name, path in models(which, Path(folder)).items():
            with Progress(console=console, transient=True) as bars:
                arms = run(path, session, n, bars)
            console.print(table(name, session, arms))
            found[name] = {
                arm: [asdict(turn) for turn in turns] for arm, turns in zip(ARMS, arms, strict=True)
            }
    return found


def models(which: str, folder: Path) -> dict[str, Path]:
    """Model folders by what to call them."""
    from transformers import AutoTokenizer

    from leyline.models.smollm2 import smollm2_path

    smollm2 = smollm2_path()
    wanted = {}
    if which in ("smollm2", "both"):
        wanted["SmolLM2-135M-Instruct (GQA)"] = smollm2
    if which in ("mla", "both"):
        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        wanted["a tiny random DeepSeek-V2 (MLA)"] = write_tiny(
            folder / "mla",
            "deepseek_v2",
            tokenizer,
            vocab_size=len(tokenizer),
            num_hidden_layers=2,
            max_position_embeddings=1 << 15,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    return wanted


def run(model: Path, session: Session, n: int, bars: Progress) -> list[list[Turn]]:
    """Both arms, one after the other, each from an empty cache."""
    starting = bars.add_task("starting SGLang on the CPU", total=None)
    with Server(model, ["--enable-cache-report"]) as server:
        bars.remove_task(starting)
        ask(server, Call([{"role": "user", "content": "Warm up."}], ""), None)
        arms = []
        for arm in ARMS:
            server.flush()
            recorded = list(calls(session))[:n]
            name = session.id if arm == ARMS[1] else None
            task = bars.add_task(arm, total=len(recorded))
            turns = []
            for call in recorded:
                turns.append(ask(server, call, name))
                bars.advance(task)
            arms.append(turns)
    return arms


def ask(server: Server, call: Call, session: str | None) -> Turn:
    """One model call, answered with one token: the recorded answer is in the next prompt."""
    body: dict[str, Any] = {"model": "default", "max_tokens": 1, "temperature": 0}
    if session is None:
        body["messages"] = clear_tool_outputs(call.messages, keep=KEEP)
    else:
        policy = {"name": "clear_tool_outputs", "keep": KEEP}
        body |= {"messages": call.messages, "leyline": {"session": session, "policy": policy}}
    began = time.perf_counter()
    answer = server.http.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - began
    if answer.status_code != 200:
        raise RuntimeError(f"SGLang answered {answer.status_code}: {answer.text}")
    found = answer.json()
    usage = found["usage"]
    moved = found["leyline"]["tokens"]["moved"] if session is not None else 0
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return Turn(usage["prompt_tokens"], cached, moved, seconds)


def table(name: str, session: Session, arms: Sequence[Sequence[Turn]]) -> Table:
    """Both arms side by side."""
    made = Table(
        title=f"{name} on SGLang: {len(arms[0])} calls of session {session.id}, "
        f"newest {KEEP} tool outputs kept"
    )
    made.add_column("")
    for arm in ARMS:
        made.add_column(arm, justify="right")
    prompt = [sum(turn.prompt for turn in turns) for turns in arms]
    cached = [sum(turn.cached for turn in turns) for turns in arms]
    made.add_row("prompt tokens", *(f"{n:,}" for n in prompt))
    made.add_row("computed", *(f"{n - m:,}" for n, m in zip(prompt, cached, strict=True)))
    made.add_row("cached", *(f"{m / n:.1%}" for n, m in zip(prompt, cached, strict=True)))
    made.add_row("of these moved", *(f"{sum(t.moved for t in turns):,}" for turns in arms))
    made.add_row("first tokens waited for", *(f"{sum(t.seconds for t in a):.1f} s" for a in arms))
    return made


if __name__ == "__main__":
    main()

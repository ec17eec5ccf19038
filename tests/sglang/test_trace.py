"""A recorded agent session through /v1/chat/completions, with a policy, call by call.

The embedded engine holds the same session with the same model: SGLang must keep what it keeps, but
for the end of a page at each end of what is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from harness import Server

from leyline.channel import Channel
from leyline.engine.engine import Config, Engine
from leyline.engine.request import Sampling
from leyline.policy import apply_policy
from leyline.replay import encode
from leyline.traces import Session, calls, load_traces

pytestmark = pytest.mark.slow

POLICY = {"name": "clear_tool_outputs", "keep": 2}
CALLS = 12
LONGEST = 1 << 16


def shortest_session() -> Session:
    return min(load_traces(), key=lambda s: len(json.dumps(s.messages[: 2 * CALLS + 2])))


def with_room(folder: Path) -> Path:
    """The checkpoint, for longer prompts."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"max_position_embeddings": LONGEST}))
    return folder


def embedded(model: Path, session: Session) -> list[Any]:
    config = Config(memory_gib=0.5, max_tokens=LONGEST)
    channel = Channel(session.id)
    with Engine.load(str(model), config=config) as engine:
        reports = []
        for call in list(calls(session))[:CALLS]:
            text = engine.tokenizer.apply_chat_template(
                apply_policy(POLICY, call.messages).messages,
                tokenize=False,
                add_generation_prompt=True,
            )
            prompt = encode(engine.tokenizer, text)
            reports.append(engine.generate(prompt, Sampling(max_tokens=1), channel).report)
    return reports


@pytest.mark.parametrize("page", [1, 16])
def test_recorded_session(page: int, tmp_path: Path) -> None:
    session = shortest_session()
    model = with_room(write_checkpoint(tmp_path, "gqa", torch.float32))
    flags = ("--page-size", str(page), "--max-total-tokens", str(2 * LONGEST))
    kept = []
    with Server(model, *flags) as server:
        client = server.openai()
        for call in list(calls(session))[:CALLS]:
            answer = client.chat.completions.create(
                model="default",
                messages=call.messages,  # type: ignore[arg-type]
                max_tokens=1,
                temperature=0,
                extra_body={"leyline": {"session": session.id, "policy": POLICY}},
            )
            kept.append(answer)
    expected = embedded(model, session)
    edited = 0
    for answer, best in zip(kept, expected, strict=True):
        report = answer.model_extra["leyline"]
        where = report["tokens"]
        assert answer.usage.prompt_tokens == where["prompt"] == best.prompt
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached == where["shared"] + where["moved"]
        # A source ends in a page that is not whole: it is gone with the request (page - 1 tokens),
        # and so is, with pages, what is too short to be worth keeping.
        assert best.cached - page < cached <= best.cached, (report, best)
        assert report["fallback"] is None
        edited += bool(report["edits"]) and where["moved"] > 0
    assert edited > CALLS / 3
    rate = sum(a.usage.prompt_tokens_details.cached_tokens for a in kept) / sum(
        a.usage.prompt_tokens for a in kept
    )
    print(f"page {page}: {rate:.1%} cached, embedded {_rate(expected):.1%}")


def _rate(reports: list[Any]) -> float:
    return sum(report.cached for report in reports) / sum(report.prompt for report in reports)

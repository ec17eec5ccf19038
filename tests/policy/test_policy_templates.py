"""Chat templates accept what a policy leaves: SmolLM2's, and those inside installed packages."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conversations import POLICIES, Message, conversations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
from transformers.utils.chat_template_utils import render_jinja_template

from leyline.api.messages import for_template
from leyline.policy import apply_policy
from leyline.traces import calls, load_traces

STRICT = """
{%- set ns = namespace(last='', open=0, called=false) -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {%- if not ns.open -%}{{ raise_exception('a result without a call') }}{%- endif -%}
    {%- set ns.open = ns.open - 1 -%}
  {%- elif m.role != 'system' -%}
    {%- if ns.open -%}{{ raise_exception('a call without a result') }}{%- endif -%}
    {%- if m.role == ns.last and not (m.role == 'assistant' and ns.called) -%}
      {{ raise_exception('two of one role in a row') }}
    {%- endif -%}
    {%- set ns.last = m.role -%}
    {%- set ns.open = (m.tool_calls or []) | length -%}
    {%- set ns.called = ns.open > 0 -%}
    {%- for call in m.tool_calls or [] -%}{{ call.function.arguments | tojson }}{%- endfor -%}
  {%- endif -%}
  [{{ m.role }}] {{ m.content }}
{%- endfor -%}
{%- if ns.last == 'user' or ns.called -%}[assistant]{%- endif -%}
"""
"""Refuses all that any template refuses: turns of one role in a row, calls left alone."""


def render(template: str, messages: list[Message]) -> str:
    given = for_template(messages)
    options: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    prompts, _ = render_jinja_template(
        [given], chat_template=template, add_generation_prompt=True, **options
    )
    return str(prompts[0])


def accepts(template: str, messages: list[Message]) -> bool:
    try:
        render(template, messages)
    except Exception:
        return False
    return True


def shipped() -> Iterator[tuple[str, str]]:
    """Chat templates written out in the modules of installed packages, by where they stand: those
    that show what a user says."""
    probe = [{"role": "user", "content": "Is this shown?"}]
    for package in ("transformers", "sglang"):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for pattern in ("*token*.py", "processing_*.py"):
                for file in sorted(Path(folder).rglob(pattern)):
                    for at, text in _templates(file.read_text(errors="ignore")):
                        if accepts(text, probe) and "Is this shown?" in render(text, probe):
                            yield f"{file.stem}:{at}", text


def _templates(source: str) -> Iterator[tuple[int, str]]:
    if "{%" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and "{%" in text and "add_generation_prompt" in text:
            yield node.lineno, text  # type: ignore[attr-defined]


TEMPLATES = dict([("strict", STRICT), *shipped()])


@pytest.fixture(params=["smollm2", *TEMPLATES])
def template(request: pytest.FixtureRequest) -> str:
    if request.param in TEMPLATES:
        return TEMPLATES[request.param]
    folder: Path = request.getfixturevalue(request.param)
    return (folder / "chat_template.jinja").read_text()


CONVERSATION = st.sampled_from(["openai", "plain"]).flatmap(conversations)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=CONVERSATION, spec=st.lists(st.one_of(*POLICIES), min_size=1, max_size=3))
def test_what_a_template_accepted_it_accepts_edited(
    template: str, messages: list[Message], spec: list[Any]
) -> None:
    """Some show one call in a message only, or no tools: what they refuse anyway is no matter."""
    if accepts(template, messages):
        render(template, apply_policy(spec, messages).messages)


def test_recorded_sessions(template: str) -> None:
    """As plain text and as tool calls: the newest output is in the prompt, the old ones are not."""
    session = load_traces()[0]
    prompt = list(calls(session))[-1].messages
    spec = {"name": "clear_tool_outputs", "keep": 1}
    for messages in (prompt, as_calls(prompt)):
        if not accepts(template, messages):
            continue
        text = render(template, apply_policy(spec, messages).messages)
        old = [message["content"] for message in prompt[2:-1:2] if len(message["content"]) > 200]
        assert old and not any(json.dumps(each)[1:40] in text for each in old)
        assert len(text) < len(render(template, messages))


def as_calls(prompt: list[Message]) -> list[Message]:
    """A recorded prompt in OpenAI's shape."""
    messages = [prompt[0]]
    for said, result in zip(prompt[1::2], prompt[2::2], strict=True):
        call = {"name": "bash", "arguments": json.dumps({"command": said["content"][-60:]})}
        made = [{"id": "1", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": None, "tool_calls": made})
        messages.append({**result, "tool_call_id": "1"})
    return messages


def test_there_are_real_templates() -> None:
    """Else the tests above say little: two besides SmolLM2's and the strictest."""
    assert len(TEMPLATES) >= 3

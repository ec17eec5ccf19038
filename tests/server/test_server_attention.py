"""`attention` in the `leyline` object: message by message what the engine says token by token, and
enough for `heavy_hitters` to work on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI
from tiny_server import Running, tiny_tokenizer, words

from leyline.api.errors import FieldError
from leyline.channel import Channel
from leyline.client import Session, attention_of, policies_of, report_of
from leyline.engine.request import Sampling
from leyline.policy import Edited
from leyline.server.attended import MOST_MESSAGES, Attended
from leyline.server.spans import message_spans
from leyline.server.text import Text

THOUGHTS_GO = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.role == 'assistant' and not loop.last %}
{{ m.content.split('</think>')[-1] }}
{%- else %}
{{ m.content }}
{%- endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Qwen3's: what an assistant thought is left out unless its message is the last one."""

USER_LAST = """
{%- if messages[-1].role != 'user' %}{{ raise_exception('The user has the last word.') }}{% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


def conversation(steps: int = 3) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": words(1, 10)}]
    for i in range(steps):
        messages.append({"role": "user", "content": words(10 + i, 12)})
        said = f"<think>{words(20 + i, 6)}</think>{words(30 + i, 7)}"
        messages.append({"role": "assistant", "content": said})
    return [*messages, {"role": "user", "content": words(99, 5)}]


def check_spans(text: Text, messages: list[Any], within: int) -> None:
    """Each span holds its message's text, and no other one's; it may be off by `within` tokens."""
    prompt = text.render(messages)
    spans = message_spans(text, messages)
    assert spans[0][0] == 0 and spans[-1][1] <= len(prompt)
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    for message, (start, end) in zip(messages, spans, strict=True):
        inner = text.tokenizer.decode(prompt[start : end + within])
        assert message["content"].split("</think>")[-1] in inner
        narrow = text.tokenizer.decode(prompt[start + within : end - within])
        others = [each for each in messages if each is not message]
        assert not any(each["content"].split("</think>")[-1] in narrow for each in others)


def test_spans() -> None:
    check_spans(Text(tiny_tokenizer()), conversation(), within=0)


def test_spans_with_smollm2(smollm2: Path) -> None:
    """Its template puts a system message in front where there is none: that is the first one's."""
    from transformers import AutoTokenizer

    text = Text(AutoTokenizer.from_pretrained(smollm2))
    check_spans(text, conversation(), within=0)
    check_spans(text, conversation()[1:], within=0)


@pytest.mark.parametrize("template", [THOUGHTS_GO, USER_LAST], ids=["thoughts-go", "user-last"])
def test_spans_where_a_beginning_is_written_otherwise(template: str) -> None:
    """A message can then end at the next one's text, behind its heading, but not further on."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    check_spans(Text(tokenizer), conversation(), within=8)


def test_spans_with_tools_and_calls() -> None:
    text, tools = Text(tiny_tokenizer()), [{"type": "function", "function": {"name": "read"}}]
    call = {"name": "read", "arguments": {"file": words(5, 3)}}
    messages = [
        {"role": "user", "content": "What is in it?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": call}]},
        {"role": "tool", "content": words(6, 9), "tool_call_id": "1"},
    ]
    prompt = text.render(messages, tools)
    parts = [text.tokenizer.decode(prompt[a:b]) for a, b in message_spans(text, messages, tools)]
    assert "What is in it?" in parts[0] and parts[0].startswith("<|im_start|>tools")
    assert words(5, 3) in parts[1] and words(6, 9) in parts[2]


# -- over HTTP --------------------------------------------------------------------------------


def ask(client: OpenAI, messages: list[Any], session: Session, **more: Any) -> Any:
    options = {"model": "tiny", "max_tokens": 4, "temperature": 0, **session.options(), **more}
    return client.chat.completions.create(messages=messages, **options)


def test_a_messages_share_is_that_of_its_tokens(server: Running, client: OpenAI) -> None:
    messages = conversation()
    answer = ask(client, messages, Session(attention=True))
    text = Text(tiny_tokenizer())
    prompt = text.render(messages)
    server.engine.reset()
    again = server.engine.generate(
        prompt, Sampling(max_tokens=4), Channel("engine", attention=True)
    )
    want = [again.attention[a:b].sum() for a, b in message_spans(text, messages)]
    assert attention_of(answer) == pytest.approx(want, abs=2e-6)
    assert 0.5 < sum(want) < 1


def test_whole_and_streamed_say_the_same(server: Running, client: OpenAI) -> None:
    messages, found = conversation(), []
    for stream in (False, True):
        server.engine.reset()
        answer = ask(client, messages, Session(attention=True), stream=stream)
        found.append(attention_of(list(answer)[-1] if stream else answer))
    assert found[0] == found[1] and found[0] is not None and len(found[0]) == len(messages)


def test_nobody_is_told_who_did_not_ask(client: OpenAI) -> None:
    answer = ask(client, conversation(), Session())
    assert attention_of(answer) is None and "attention" not in answer.model_extra["leyline"]


def test_what_a_policy_dropped_has_none(client: OpenAI) -> None:
    session = Session(policy={"name": "keep_window", "newest": 1}, attention=True)
    answer = ask(client, conversation(), session)
    (did,), found = policies_of(answer), attention_of(answer)
    assert did.messages > 0 and found is not None
    assert found.count(None) == did.messages and len(found) == len(conversation())


def test_completions_say_it_token_by_token(client: OpenAI) -> None:
    tokens = tiny_tokenizer()(words(3, 30), add_special_tokens=False).input_ids
    answer = client.completions.create(
        model="tiny", prompt=tokens, max_tokens=1, **Session(attention=True).options()
    )
    found = attention_of(answer)
    assert found is not None and len(found) == len(tokens)
    # One query sees itself, the answer's only token is never read from.
    assert sum(each or 0 for each in found) == pytest.approx(1, abs=1e-4)


def test_anthropic(server: Running) -> None:
    client = Anthropic(base_url=server.url, api_key="none", max_retries=0)
    messages = [each for each in conversation() if each["role"] != "system"]
    options: Any = {"model": "tiny", "max_tokens": 4, "system": words(1, 10)}
    answer = client.messages.create(
        messages=messages, **options, **Session(attention=True).options()
    )
    found = attention_of(answer)
    assert found is not None and len(found) == 1 + len(messages)  # with the system prompt


def test_it_must_be_true_or_false(client: OpenAI) -> None:
    for wrong in (1, "yes", [True]):
        with pytest.raises(BadRequestError, match=r"leyline\.attention"):
            client.chat.completions.create(
                model="tiny",
                messages=conversation(),
                extra_body={"leyline": {"session": "a", "attention": wrong}},
            )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_prompt_that_is_too_long_is_rendered_once(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """It is refused before its messages are told apart: that takes a time that grows with their
    square, and strangers could send a million."""
    rendered, written = [], Text.written

    def noted(text: Text, messages: list[Any], *more: Any, **options: Any) -> str:
        rendered.append(len(messages))
        return written(text, messages, *more, **options)

    monkeypatch.setattr(Text, "written", noted)
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": words(i, 20)} for i in range(801)]
    leyline = {"session": "long", "attention": True}
    body = {"model": "tiny", "max_tokens": 1, "messages": messages, "leyline": leyline}
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 400 and "takes 8192 together" in answer.text
    assert rendered == [801]


def test_so_many_messages_can_not_be_told_apart() -> None:
    view = Edited.nothing([{"role": "user", "content": ""}] * (MOST_MESSAGES + 1))
    with pytest.raises(FieldError, match=r"^leyline\.attention: .* 2000 messages.* 2001\.$"):
        Attended.to(Text(tiny_tokenizer()), view, MOST_MESSAGES + 1)


def test_heavy_hitters_keep_what_the_model_attends_to(client: OpenAI) -> None:
    """The loop of the docs: one call's attention is the next one's mass. What went stays away, the
    prompt stops growing, and what stays is spliced, not prefilled."""
    messages: list[Any] = [{"role": "system", "content": words(1, 10)}]
    mass: list[float | None] = []
    sizes, moved = [], 0
    for turn in range(8):
        messages.append({"role": "user", "content": words(50 + turn, 20)})
        policy = {"name": "heavy_hitters", "mass": mass, "budget": 60}
        answer = ask(client, messages, Session("hitters", policy=policy, attention=True))
        report, found = report_of(answer), attention_of(answer)
        assert report is not None and report.fallback is None and found is not None
        gone = [i for i, each in enumerate(mass) if each is None]
        assert all(found[i] is None for i in gone)
        sizes.append(report.prompt)
        moved += report.moved
        mass = found
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or "-"})
    assert mass.count(None) >= 3 and moved > 0
    assert max(sizes[4:]) < 1.5 * min(sizes[4:]), sizes

"""The official client against a running server: nothing of it is special to Leyline."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from tiny_server import Running, tiny_tokenizer, words

SYSTEM = {"role": "system", "content": words(1, 40)}
MESSAGES: list[Any] = [SYSTEM, {"role": "user", "content": "hello"}]


def ask(client: OpenAI, **more: Any) -> Any:
    given = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, **more}
    return client.chat.completions.create(**given)


def tokens_of(messages: list[Any], **more: Any) -> list[int]:
    text = tiny_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **more
    )
    return tiny_tokenizer()(text, add_special_tokens=False).input_ids


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 8192  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")


def test_chat_is_what_the_engine_says(server: Running, client: OpenAI) -> None:
    answer = ask(client)
    prompt = tokens_of(MESSAGES)
    want = server.engine.generate(prompt, _greedy(6))
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == want.text and len(want.text) > 0
    assert choice.finish_reason == want.reason == "length"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == len(prompt) + 6
    assert "leyline" not in answer.model_extra


def test_cached_tokens_are_told_without_a_session_too(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": words(99)}]
    first = ask(client, messages=messages).usage
    again = ask(client, messages=messages).usage
    assert first.prompt_tokens_details.cached_tokens < first.prompt_tokens - 1
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1


def test_streaming_gives_the_same_text(client: OpenAI) -> None:
    chunks = list(ask(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ask(client).choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_streamed_usage_comes_last_if_asked_for(client: OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 0
    assert chunks[-2].choices[0].finish_reason == "length"


def test_a_stream_is_sse_and_ends_with_done(server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": True}
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first = json.loads(events[0].removeprefix("data: "))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["finish_reason"] is None


def test_tools_reach_the_chat_template(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    answer = ask(client, tools=[tool])
    assert answer.usage.prompt_tokens == len(tokens_of(MESSAGES, tools=[tool]))
    without = ask(client, tools=[tool], tool_choice="none")
    assert without.usage.prompt_tokens == len(tokens_of(MESSAGES))


def test_calls_and_parts_reach_the_chat_template(client: OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    sent: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    call = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
    meant = [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done"},
    ]
    assert ask(client, messages=sent).usage.prompt_tokens == len(tokens_of(meant))


def test_chat_template_kwargs(client: OpenAI) -> None:
    answer = ask(client, extra_body={"chat_template_kwargs": {"shout": True}})
    assert answer.usage.prompt_tokens == len(tokens_of(MESSAGES, shout=True))


def test_logprobs(client: OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert len(content) == 6
    raw = b"".join(bytes(each.bytes) for each in content)  # tokens may be parts of characters
    assert raw.decode(errors="replace") == choice.message.content
    for each in content:
        assert each.logprob < 0
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].token == each.token  # greedy
        values = [top.logprob for top in each.top_logprobs]
        assert values == sorted(values, reverse=True)
    assert ask(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    streamed = [c.choices[0].logprobs for c in ask(client, stream=True, logprobs=True)]
    got = [each.logprob for part in streamed if part for each in part.content]
    np.testing.assert_allclose(got, [each.logprob for each in content], atol=1e-4)


def test_stop(client: OpenAI) -> None:
    whole = ask(client, max_tokens=8, temperature=1, seed=5).choices[0].message.content
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    for given in (stop, ["no such text", stop]):
        choice = ask(client, max_tokens=8, temperature=1, seed=5, stop=given).choices[0]
        assert choice.message.content == whole[: whole.index(stop)]
        assert choice.finish_reason == "stop"
    chunks = ask(client, max_tokens=8, temperature=1, seed=5, stop=stop, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole[: whole.index(stop)]


def test_seed(client: OpenAI) -> None:
    texts = {seed: _drawn(client, seed) for seed in (1, 2, 3)}
    assert len(set(texts.values())) == 3
    assert all(_drawn(client, seed) == text for seed, text in texts.items())


def _drawn(client: OpenAI, seed: int) -> str:
    answer = ask(client, temperature=None, seed=seed, max_tokens=12)  # 1.0 unless said otherwise
    return answer.choices[0].message.content


@pytest.mark.parametrize("cut", [{"top_p": 0}, {"top_p": 1e-9}, {"temperature": 1e-30}])
def test_extreme_sampling_is_greedy(client: OpenAI, cut: dict[str, float]) -> None:
    want = ask(client).choices[0].message.content
    assert ask(client, **{"temperature": 1, **cut}).choices[0].message.content == want
    only_best = ask(client, temperature=1, extra_body={"top_k": 1}).choices[0].message.content
    assert only_best == want


def test_limits_of_the_answer(client: OpenAI) -> None:
    assert ask(client, max_tokens=None, max_completion_tokens=3).usage.completion_tokens == 3
    more = {"max_completion_tokens": 3, "max_tokens": 3}
    assert ask(client, **more).usage.completion_tokens == 3


def test_completions(server: Running, client: OpenAI) -> None:
    tokens = tiny_tokenizer()("bat ben", add_special_tokens=False).input_ids
    want = server.engine.generate(tokens, _greedy(5)).text
    for prompt in ("bat ben", ["bat ben"], tokens, [tokens]):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0)
        assert answer.choices[0].text == want
        assert answer.object == "text_completion"
    sent = {"model": "tiny", "prompt": tokens, "temperature": 0}
    assert client.completions.create(**sent).usage.completion_tokens == 16  # the API's default
    chunks = list(
        client.completions.create(
            **sent, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == want
    assert chunks[-1].usage.completion_tokens == 5


def test_completion_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="bat", max_tokens=4, temperature=0, logprobs=2
    )
    found: Any = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 4
    for token, value, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == value == max(top.values())


def test_prefill_only(server: Running) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 0}).json()
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 0


def test_harmless_fields_are_taken(client: OpenAI) -> None:
    answer = ask(
        client,
        user="me",
        metadata={"a": "b"},
        store=False,
        n=1,
        presence_penalty=0,
        parallel_tool_calls=True,
        response_format={"type": "text"},
        logit_bias={},
        extra_body={"something_new": 3, "ignore_eos": True, "leyline": None},
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("best_of", 3),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("echo", True),
        ("suffix", "x"),
        ("min_p", 0.1),
        ("guided_json", {}),
        ("functions", [{"name": "f"}]),
        ("temperature", 3),
        ("temperature", "1"),
        ("temperature", 1e999),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**64),
        ("seed", True),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_completion_tokens", 7),
        ("top_logprobs", 3),
        ("top_logprobs", 21),
        ("stream", "yes"),
        ("stream_options.include_usage", 1),
        ("stop", 5),
        ("stop", ""),
        ("stop[1]", ["a", 5]),
        ("stop", ["a"] * 5),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs.tokenize", True),
        ("messages", []),
        ("messages", "hi"),
        ("messages[0]", ["hi"]),
        ("messages[0].role", [{"content": "hi"}]),
        ("messages[0].content", [{"role": "user", "content": None}]),
        ("messages[0].content", [{"role": "user", "content": 5}]),
        (
            "messages[0].content[0].type",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ),
        ("messages[0].tool_calls[0]", [{"role": "assistant", "tool_calls": [5]}]),
        ("tools", {}),
        ("tools[0]", ["f"]),
        ("model", 5),
    ],
)
def test_bad_fields_are_named(server: Running, field: str, value: Any) -> None:
    """I6: one sentence, never ignored."""
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 3}
    name, _, rest = field.split("[")[0].partition(".")
    body[name] = {rest: value} if rest and name != "messages" else value
    if field == "messages[0].role":
        body["messages"] = value
    text = json.dumps(body).replace("Infinity", "1e999")
    with server.http() as http:
        answer = http.post("/v1/chat/completions", content=text)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    param = "max_tokens" if field == "max_completion_tokens" else field
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ") and error["message"].endswith(".")
    assert error["code"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ("", "prompt"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([1, "a"], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([100_000], "prompt"),
        ({"a": 1}, "prompt"),
    ],
)
def test_bad_prompts(server: Running, prompt: Any, param: str) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_the_chat_templates_own_sentence(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Role pope is not one of mine"):
        ask(client, messages=[{"role": "pope", "content": "x"}])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"max_tokens": ' + b"9" * 10_000 + b"}",
    ],
)
def test_bodies_that_are_no_json_object(server: Running, body: bytes) -> None:
    with server.http() as http:
        answer = http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert "message" in answer.json()["error"]


def test_prompt_too_long(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "x " * 9000}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="8192"):
        ask(client, max_tokens=9000)


def test_wrong_model_and_wrong_paths(server: Running, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-9")
    assert caught.value.code == "model_not_found"
    with server.http() as http:
        for method, path, status in [
            ("GET", "/v1/nothing", 404),
            ("GET", "/", 404),
            ("GET", "/v1/chat/completions", 405),
            ("GET", "/docs", 404),
        ]:
            answer = http.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["message"]


def test_a_model_may_be_left_out(server: Running) -> None:
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1})
    assert answer.status_code == 200
    assert answer.json()["model"] == "tiny"


def test_many_at_once(server: Running) -> None:
    """Streams of several clients don't mix; afterwards slots add up (I7)."""
    import asyncio

    prompts = [words(seed, 20) for seed in range(8)]

    async def one(http: httpx.AsyncClient, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "stream": True}
        text = (await http.post("/v1/completions", json=body)).text
        lines = [line.removeprefix("data: ") for line in text.split("\n\n")[:-2]]
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines)

    async def all_of_them() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            return await asyncio.gather(*(one(http, prompt) for prompt in prompts))

    together = asyncio.run(all_of_them())
    for prompt, text in zip(prompts, together, strict=True):
        assert text == server.engine.generate(prompt, _greedy(6)).text
    server.settled()


def _greedy(n: int) -> Any:
    from leyline.engine.request import Sampling

    return Sampling(max_tokens=n)

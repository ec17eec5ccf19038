"""The `leyline` object in and out, over HTTP with the official client (design §5)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI
from tiny_server import Running, tiny_tokenizer, words

from leyline.channel import Channel
from leyline.directive import Directive
from leyline.engine.request import Request, Sampling


def conversation(seed: int, first: str) -> list[Any]:
    """Three turns; `first` is edited, the others stay."""
    return [
        {"role": "system", "content": words(seed, 10)},
        {"role": "tool", "content": first},
        {"role": "user", "content": words(seed + 1, 60)},
    ]


def ask(client: OpenAI, messages: list[Any], leyline: dict[str, Any], **more: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, **more},
        extra_body={"leyline": leyline},
    )


def test_an_edit_moves_rows(server: Running, client: OpenAI) -> None:
    """I4 through the whole server: same tokens as the engine gives for the same edit."""
    long, short = words(11, 80), "gone"
    first = ask(client, conversation(10, long), {"session": "edit"})
    assert first.leyline["tokens"]["shared"] + first.leyline["tokens"]["computed"] == (
        first.usage.prompt_tokens
    )
    assert first.leyline["edits"] == [] and first.leyline["fallback"] is None
    second = ask(client, conversation(10, short), {"session": "edit"})
    report = second.leyline
    (edit,) = report["edits"]
    assert edit["mode"] == "amortize"
    assert edit["shift"] == edit["replacement_tokens"] - (edit["end"] - edit["start"]) < 0
    tokens = report["tokens"]
    assert tokens["moved"] > 60
    assert tokens["computed"] < 20
    assert tokens["prompt"] == tokens["shared"] + tokens["moved"] + tokens["computed"]
    assert tokens["prompt"] == second.usage.prompt_tokens
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens == tokens["shared"] + tokens["moved"]
    assert report["session"] == "edit" and report["copied"] is False and report["splice_ms"] > 0
    server.settled()


def test_the_report_comes_in_the_last_chunk(client: OpenAI) -> None:
    ask(client, conversation(20, words(21, 50)), {"session": "streamed"})
    for session, usage in (("streamed", False), ("streamed2", True)):
        ask(client, conversation(20, words(21, 50)), {"session": session})
        options = {"include_usage": usage}
        chunks = list(
            ask(
                client,
                conversation(20, "short"),
                {"session": session},
                stream=True,
                stream_options=options,
            )
        )
        assert all("leyline" not in chunk.model_extra for chunk in chunks[:-1])
        assert chunks[-1].leyline["tokens"]["moved"] > 50
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 50
        assert (chunks[-1].choices == []) is usage


def test_completions_report_too(client: OpenAI) -> None:
    tokens = tiny_tokenizer()(words(30, 150), add_special_tokens=False).input_ids
    sent: dict[str, Any] = {"model": "tiny", "max_tokens": 1}
    leyline = {"leyline": {"session": "text"}}
    client.completions.create(prompt=tokens, **sent, extra_body=leyline)
    edited = tokens[:20] + tokens[40:]
    answer = client.completions.create(prompt=edited, **sent, extra_body=leyline)
    assert answer.leyline["tokens"]["moved"] == len(edited) - 20 - 1  # type: ignore[attr-defined]
    answer = client.completions.create(
        prompt=edited[:30] + edited[50:], **sent, stream=True, extra_body=leyline
    )
    assert list(answer)[-1].leyline["tokens"]["moved"] > 0


@pytest.mark.parametrize("as_list", [False, True])
def test_explicit_directives(client: OpenAI, as_list: bool) -> None:
    tokens = tiny_tokenizer()(words(40 + as_list, 60), add_special_tokens=False).input_ids
    session = f"explicit {as_list}"
    sent: dict[str, Any] = {"model": "tiny", "max_tokens": 1, "temperature": 0}
    client.completions.create(prompt=tokens, **sent, extra_body={"leyline": {"session": session}})
    directive: Any = {"start": 5, "end": 30, "replacement": [9, 8], "mode": "amortize"}
    directive = list(directive.values()) if as_list else directive
    target = [*tokens[:5], 9, 8, *tokens[30:], 7, 7]
    answer = client.completions.create(
        prompt=target,
        **sent,
        extra_body={"leyline": {"session": session, "directives": [directive]}},
    )
    report = answer.leyline  # type: ignore[attr-defined]
    assert report["tokens"]["moved"] == len(tokens) - 30
    assert report["tokens"]["computed"] == 4
    assert {k: report["edits"][0][k] for k in ("start", "end", "replacement_tokens", "shift")} == {
        "start": 5,
        "end": 30,
        "replacement_tokens": 2,
        "shift": -23,
    }


def test_forget_and_scrub(server: Running, client: OpenAI) -> None:
    """I5: the answer is a fresh engine's, no row is amortized, free rows are zero."""
    before, after = conversation(50, words(51, 80)), conversation(50, "gone")
    ask(client, before, {"session": "forget"})
    answer = ask(
        client, after, {"session": "forget", "mode": "forget", "scrub": True}, logprobs=True
    )
    report = answer.leyline
    assert report["tokens"]["moved"] == 0
    assert report["forgotten"] > 60
    assert report["edits"][0]["mode"] == "forget"
    view = server.engine.session("", "forget")
    assert view is not None and view.exact == view.tokens
    store = server.engine.store
    unused = server.engine.call(
        lambda: float(store.planes.keys[0][store.pool.free_slots()].abs().max())
    )
    # Rows that the answer has used since are not free.
    assert unused == 0
    plain = client.chat.completions.create(
        model="tiny", messages=after, max_tokens=4, temperature=0, logprobs=True
    )
    assert plain.choices[0].message.content == answer.choices[0].message.content
    np.testing.assert_allclose(
        [each.logprob for each in answer.choices[0].logprobs.content],
        [each.logprob for each in plain.choices[0].logprobs.content],
        atol=1e-4,
    )


def test_repair_recomputes(client: OpenAI) -> None:
    ask(client, conversation(60, words(61, 80)), {"session": "repair"})
    leyline = {"session": "repair", "mode": "repair", "repair": 16}
    report = ask(client, conversation(60, "gone"), leyline).leyline
    assert report["edits"][0]["mode"] == "repair"
    assert 16 < report["tokens"]["computed"] < 40 < report["tokens"]["moved"]


@pytest.mark.parametrize("stream", [False, True])
def test_strict(client: OpenAI, stream: bool) -> None:
    """I6: a fallback is a 409, streamed or not; without strict it is prefilled and told."""
    edit = [{"start": 0, "end": 2}]
    with pytest.raises(openai.ConflictError) as caught:
        ask(
            client,
            conversation(70, "a"),
            {"session": "never seen", "directives": edit, "strict": True},
            stream=stream,
        )
    assert caught.value.code == "source_missing"
    assert caught.value.param == "leyline.strict"
    assert caught.value.response.headers["x-should-retry"] == "false"
    leyline = {"session": f"never seen {stream}", "directives": edit}
    report = ask(client, conversation(70, "a"), leyline).leyline
    assert report["fallback"] == "source_missing"
    assert report["tokens"]["moved"] == 0


def test_policy(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "s"}]
    for i in range(4):
        messages += [
            {"role": "user", "content": words(80 + i, 20)},
            {"role": "tool", "content": words(90 + i, 40)},
        ]
    policy = {"name": "clear_tool_outputs", "keep": 1, "placeholder": "[gone]"}
    ask(client, messages, {"session": "policy"})
    answer = ask(client, messages, {"session": "policy", "policy": policy})
    edited = [{**m, "content": "[gone]"} if m["role"] == "tool" else m for m in messages]
    edited[-1] = messages[-1]
    text = tiny_tokenizer().apply_chat_template(edited, tokenize=False, add_generation_prompt=True)
    want = tiny_tokenizer()(text, add_special_tokens=False).input_ids
    assert answer.usage.prompt_tokens == len(want)
    assert len(answer.leyline["edits"]) == 3
    assert answer.leyline["tokens"]["moved"] > 100

    def tokens(text: str) -> int:
        return len(tiny_tokenizer()(text, add_special_tokens=False).input_ids)

    freed = sum(tokens(words(90 + i, 40)) - tokens("[gone]") for i in range(3))
    (did,) = answer.leyline["policy"]
    assert did == {
        "name": "clear_tool_outputs",
        "tokens": freed,
        "tool_uses": 3,
        "thinking_turns": 0,
        "messages": 0,
    }
    assert ask(client, messages, {"session": "policy"}).leyline["policy"] == []
    for policy, param in [
        ({"name": "nope"}, "leyline.policy.name"),
        ({"name": "clear_tool_outputs", "keep": -1}, "leyline.policy.keep"),
        ({"name": "clear_tool_outputs", "kep": 1}, "leyline.policy.kep"),
        ({}, "leyline.policy.name"),
        (5, "leyline.policy"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, messages, {"session": "policy", "policy": policy})
        assert caught.value.param == param
    with pytest.raises(openai.BadRequestError, match=r"leyline\.policy"):
        client.completions.create(
            model="tiny",
            prompt="x",
            extra_body={"leyline": {"session": "a", "policy": {"name": "clear_tool_outputs"}}},
        )


@pytest.mark.parametrize(
    ("leyline", "param"),
    [
        ([], "leyline"),
        ("run", "leyline"),
        ({}, "leyline.session"),
        ({"session": None}, "leyline.session"),
        ({"session": 5}, "leyline.session"),
        ({"session": ""}, "leyline.session"),
        ({"session": "x" * 257}, "leyline.session"),
        ({"session": "a\nb"}, "leyline.session"),
        ({"session": "a\u200bb"}, "leyline.session"),
        ({"session": "a", "mode": "drop"}, "leyline.mode"),
        ({"session": "a", "mode": 1}, "leyline.mode"),
        ({"session": "a", "mode": "repair"}, "leyline.repair"),
        ({"session": "a", "mode": "repair", "repair": -1}, "leyline.repair"),
        ({"session": "a", "mode": "repair", "repair": 1.5}, "leyline.repair"),
        ({"session": "a", "repair": 4}, "leyline.repair"),
        ({"session": "a", "strict": 1}, "leyline.strict"),
        ({"session": "a", "scrub": "yes"}, "leyline.scrub"),
        ({"session": "a", "scrub": True}, "leyline.scrub"),
        ({"session": "a", "sesion": "b"}, "leyline.sesion"),
        ({"session": "a", "directives": {}}, "leyline.directives"),
        ({"session": "a", "directives": [[0, 1, [], "amortize"]] * 10_001}, "leyline.directives"),
    ],
)
def test_malformed_objects(server: Running, leyline: Any, param: str) -> None:
    """I6: 400, the field named; also when streaming, before any header of a stream."""
    with server.http() as http:
        for stream in (False, True):
            body = {"messages": conversation(1, "a"), "leyline": leyline, "stream": stream}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param
            assert error["message"].startswith(f"{param}: ")


def test_sessions_are_apart(server: Running, client: OpenAI) -> None:
    """I1, I8: an amortized branch is found by its session only."""
    before, after = conversation(120, words(121, 80)), conversation(120, "gone")
    ask(client, before, {"session": "mine"})
    mine = ask(client, after, {"session": "mine"})
    assert mine.leyline["tokens"]["moved"] > 60
    plain = client.chat.completions.create(model="tiny", messages=after, max_tokens=1)
    other = ask(client, after, {"session": "another"})
    shared = mine.leyline["tokens"]["shared"]
    assert plain.usage is not None and plain.usage.prompt_tokens_details is not None
    assert plain.usage.prompt_tokens_details.cached_tokens <= shared + 10
    # What the plain request computed is exact, so it is there for everybody.
    assert other.leyline["tokens"]["moved"] == 0
    again = ask(client, after, {"session": "mine"})
    assert again.leyline["tokens"]["computed"] == 1


def test_the_same_answer_as_the_engine(server: Running, client: OpenAI) -> None:
    """The server adds nothing: an edit over HTTP is the edit that Python gives."""
    tokens = tiny_tokenizer()(words(130, 60), add_special_tokens=False).input_ids
    target = [*tokens[:10], 5, *tokens[30:]]
    channel = Channel(session="python", directives=(Directive(10, 30, (5,)),))
    engine = server.engine
    engine.generate(tokens, Sampling(max_tokens=1), Channel(session="python"))
    request = Request(np.array(target), Sampling(max_tokens=5, logprobs=0), channel)
    want = engine.submit(request).result()
    extra: dict[str, Any] = {"leyline": {"session": "http"}}
    sent: dict[str, Any] = {"model": "tiny", "temperature": 0, "logprobs": 0}
    client.completions.create(prompt=tokens, **sent, max_tokens=1, extra_body=extra)
    extra["leyline"]["directives"] = [[10, 30, [5], "amortize"]]
    got = client.completions.create(prompt=target, **sent, max_tokens=5, extra_body=extra)
    assert got.choices[0].text == want.text
    assert got.choices[0].logprobs is not None
    np.testing.assert_allclose(
        got.choices[0].logprobs.token_logprobs,  # type: ignore[arg-type]
        [each.logprob for each in want.logprobs],
        atol=1e-4,
    )


def test_reports_are_json(server: Running) -> None:
    """What the design shows, field by field."""
    with server.http() as http:
        body = {"prompt": "bat", "max_tokens": 1, "leyline": {"session": "json"}}
        answer = http.post("/v1/completions", json=body).json()
    report = answer["leyline"]
    assert set(report) == {
        "session",
        "edits",
        "tokens",
        "fallback",
        "splice_ms",
        "copied",
        "forgotten",
        "kept_by_others",
        "policy",
    }
    assert set(report["tokens"]) == {"prompt", "shared", "moved", "computed"}
    assert json.dumps(report["fallback"]) == "null"

"""leyline.client with both official SDKs, sync and async, against a running server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError, OpenAI
from tiny_claude import agent_turn, client_of
from tiny_server import Running, words

from leyline.client import Session, Watched, policies_of, report_of
from leyline.directive import Directive, Mode

SYSTEM = words(1, 40)


def history(outputs: int, cleared: int = 0) -> list[Any]:
    """A conversation in which the first tool outputs are cleared."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for i in range(outputs):
        output = "[gone]" if i < cleared else words(100 + i, 60)
        messages.append({"role": "assistant", "content": words(10 + i, 8)})
        messages.append({"role": "tool", "tool_call_id": f"t{i}", "content": output})
    return messages


def ask(client: Any, messages: list[Any], session: Session, **more: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, temperature=0, **session.options(), **more
    )


def test_an_edit_is_derived_and_reported(client: OpenAI) -> None:
    session = Session()
    first = report_of(ask(client, history(3), session))
    assert first is not None and first.session == session.name and not first.edits
    then = report_of(ask(client, history(4, cleared=2), session))
    assert then is not None and then.moved > 60 and then.fallback is None
    assert then.prompt == then.shared + then.moved + then.computed
    assert [edit.mode for edit in then.edits] == [Mode.AMORTIZE] * 2
    assert then.cached == then.shared + then.moved


def test_two_sessions_have_different_names() -> None:
    assert Session().name != Session().name


def test_the_servers_policy_and_mode(client: OpenAI) -> None:
    policy = {"name": "clear_tool_outputs", "keep": 2}
    for spec in (policy, [policy]):
        session = Session(policy=spec, mode=Mode.REPAIR, repair=4)
        ask(client, history(3), session)
        answer = ask(client, history(4), session)
        report, (did,) = report_of(answer), policies_of(answer)
        assert report is not None
        assert (did.policy, did.tool_uses) == ("clear_tool_outputs", 2) and did.tokens > 60
        assert [edit.mode for edit in report.edits] == [Mode.REPAIR]


def test_explicit_directives(client: OpenAI) -> None:
    session = Session(strict=True)
    asked = dict(model="tiny", max_tokens=1, temperature=0)
    prompt = list(range(10, 90))
    client.completions.create(prompt=prompt, **asked, **session.options())
    edit = Directive(10, 30, (3, 4), Mode.REPAIR, 5)
    target = [*prompt[:10], 3, 4, *prompt[30:]]
    answer = client.completions.create(prompt=target, **asked, **session.options([edit]))
    report = report_of(answer)
    assert report is not None
    assert [(e.start, e.end, e.replacement_tokens, e.mode) for e in report.edits] == [
        (10, 30, 2, Mode.REPAIR)
    ]
    with pytest.raises(BadRequestError, match="directives"):
        client.completions.create(prompt=target, **asked, **session.options([Directive(5, 10**6)]))


def test_a_stream_has_its_report_at_the_end(client: OpenAI) -> None:
    session = Session()
    stream = Watched[Any](ask(client, history(2), session, stream=True))
    text = ""
    for chunk in stream:
        assert stream.report is None or not chunk.choices or chunk.choices[0].finish_reason
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text and stream.report is not None and stream.report.session == session.name


def test_anthropics_sdk(server: Running) -> None:
    claude = client_of(server)
    session = Session(policy={"name": "clear_tool_outputs", "keep": 1})
    asked: Any = dict(model="tiny", system=SYSTEM, max_tokens=2)
    messages = [{"role": "user", "content": "go"}, *agent_turn(1)]
    messages.append({"role": "user", "content": words(3, 60)})
    first = report_of(claude.messages.create(messages=messages, **asked, **session.options()))
    assert first is not None and not first.edits
    messages += agent_turn(2)
    stream = Watched[Any](
        claude.messages.create(messages=messages, stream=True, **asked, **session.options())
    )
    kinds = [event.type for event in stream]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert stream.report is not None and stream.report.moved and len(stream.report.edits) == 1


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_an_edit_while_a_tool_runs(server: Running, client: OpenAI, sdk: str) -> None:
    """The next request shares all rows up to its new tokens: nothing is left to move."""
    session = Session("run/7 of ..")
    ask(client, history(3), session)
    poster: OpenAI | Anthropic = client if sdk == "openai" else client_of(server)
    done = report_of(poster.post(**session.edit(poster, messages=history(3, cleared=2))))
    assert done is not None and done.moved and len(done.edits) == 2
    then = report_of(ask(client, history(4, cleared=2), session))
    assert then is not None and not then.edits
    assert then.shared >= done.prompt - 1


def test_a_sessions_policy_goes_with_messages_only(client: OpenAI) -> None:
    """Directives and a prompt can be sent ahead all the same; another policy is the caller's."""
    session = Session(policy={"name": "clear_tool_outputs", "keep": 2})
    ask(client, history(3), session)
    done = report_of(client.post(**session.edit(client, directives=[Directive(10, 30)])))
    assert done is not None and [(edit.start, edit.end) for edit in done.edits] == [(10, 30)]
    done = report_of(client.post(**session.edit(client, prompt=list(range(10, 90)))))
    assert done is not None and done.prompt == 80
    ahead: Any = client.post(**session.edit(client, messages=history(4)))
    (did,) = policies_of(ahead)
    assert (did.policy, did.tool_uses) == ("clear_tool_outputs", 2)
    wrong = session.edit(client, prompt=[5, 6], policy={"name": "clear_thinking"})
    with pytest.raises(BadRequestError, match="policy: goes with messages only"):
        client.post(**wrong)


def test_async_clients(server: Running) -> None:
    async def hold() -> None:
        session = Session()
        url = f"{server.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await ask(client, history(3), session)
            stream = Watched[Any](await ask(client, history(3, cleared=1), session, stream=True))
            assert [chunk async for chunk in stream]
            assert stream.report is not None and stream.report.edits
        async with AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
            options = session.edit(claude, messages=history(3, cleared=3))
            done = report_of(await claude.post(**options))
            assert done is not None and done.edits

    asyncio.run(hold())


def test_answers_without_a_report(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=history(1), max_tokens=1)
    assert report_of(answer) is None
    assert report_of({"meta_info": {"leyline": None}}) is None
    assert report_of({}) is None and policies_of({}) == ()


def test_a_report_as_sglangs_own_endpoint_has_it() -> None:
    raw = {
        "session": "s",
        "edits": [{"start": 1, "end": 3, "replacement_tokens": 0, "shift": -2, "mode": "forget"}],
        "tokens": {"prompt": 9, "shared": 1, "moved": 0, "computed": 8},
        "fallback": "no_room",
        "splice_ms": 0.5,
    }
    for answer in ({"meta_info": {"leyline": raw}}, {"meta_info": {"leyline": [raw, raw]}}):
        report = report_of(answer)
        assert report is not None
        assert report.fallback == "no_room" and report.edits[0].shift == -2

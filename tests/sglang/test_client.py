"""leyline.client with the official SDKs against SGLang: an edit while a tool runs."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from harness import Server

from leyline.client import Session, policies_of, report_of
from leyline.directive import Directive, Mode

pytestmark = pytest.mark.sglang


def history(outputs: int, cleared: int = 0) -> list[dict[str, Any]]:
    """A conversation whose first tool outputs are cleared."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "read all files, please " * 3}]
    for i in range(outputs):
        rows = " ".join(f"row {k} of table {i}" for k in range(30))
        output = "[gone]" if i < cleared else rows
        messages.append({"role": "assistant", "content": f"i read the file number {i} now"})
        messages.append({"role": "tool", "tool_call_id": f"t{i}", "content": output})
    return messages


def ask(client: Any, messages: list[Any], session: Session) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, temperature=0, **session.options()
    )


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_an_edit_while_a_tool_runs(server: Server, sdk: str) -> None:
    """The next request shares all rows up to its new tokens: nothing is left to move."""
    client = server.openai()
    session = Session(f"client/7 of .. {sdk}")
    ask(client, history(3), session)
    poster: Any = client
    if sdk == "anthropic":
        poster = Anthropic(base_url=server.url, api_key="none", max_retries=0)
    done = report_of(poster.post(**session.edit(poster, messages=history(3, cleared=2))))
    assert done is not None and done.moved and len(done.edits) == 2
    then = report_of(ask(client, history(4, cleared=2), session))
    assert then is not None and not then.edits and not then.moved
    assert then.shared == done.prompt


def test_policies_and_directives(server: Server) -> None:
    client = server.openai()
    session = Session("client-policy", policy="clear_tool_outputs")
    ask(client, history(5), session)
    answer: Any = client.post(**session.edit(client, messages=history(5)))
    (did,) = policies_of(answer)
    assert did.policy == "clear_tool_outputs"
    plain = Session("client-policy")
    edit = plain.edit(client, directives=[Directive(20, 40, (5, 6), Mode.REPAIR, 3)])
    report = report_of(client.post(**edit))
    assert report is not None and [each.mode for each in report.edits] == [Mode.REPAIR]


def test_errors_are_the_sdks_own(server: Server) -> None:
    client = server.openai()
    edit = Session("client-nobody").edit(client, directives=[Directive(0, 5)])
    with pytest.raises(openai.NotFoundError, match="client-nobody"):
        client.post(**edit)
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.post(**Session().edit(client, messages=[]))


def test_async_clients(server: Server) -> None:
    async def hold() -> None:
        session = Session("client-async")
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await ask(client, history(3), session)
            options = session.edit(client, messages=history(3, cleared=1))
            done = report_of(await client.post(**options))
            assert done is not None and done.edits

    asyncio.run(hold())

"""What a caller of the OpenAI or Anthropic SDK needs: what to send, and what became of it.

    session = Session("run-42", policy={"name": "clear_tool_outputs", "keep": 2})
    answer = client.chat.completions.create(model=…, messages=…, **session.options())
    print(report_of(answer))

The same for `client.messages.create`, for their streams and their async clients, against Leyline's
server and SGLang with the plugin. No SDK is imported here.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from leyline.channel import EditReport, Fallback, Report
from leyline.directive import Directive, Mode
from leyline.policy import Applied

Chunk = TypeVar("Chunk")
Json = dict[str, Any]


def _new_name() -> str:
    return f"session-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation. What it holds goes with every request; see docs/api.md for the fields.

    name: one of its own by default. policy: one, or a list of them, applied in order by the server;
    a name alone is one with its defaults. Leave it out where the messages are edited here.
    attention: have answers say what each message got of the model's, see `attention_of`. Leyline's
    server.
    """

    name: str = field(default_factory=_new_name)
    policy: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    mode: Mode | str = Mode.AMORTIZE
    repair: int | None = None
    strict: bool = False
    scrub: bool = False
    attention: bool = False

    def options(self, directives: Sequence[Directive] | None = None) -> Json:
        """Keyword arguments for the SDK's `create`: `extra_body` with the `leyline` object. Where
        you have more to put into `extra_body`, put `request()` there under `leyline`.

        directives: explicit edits of what the session has; by default they are derived.
        """
        return {"extra_body": {"leyline": self.request(directives)}}

    def request(self, directives: Sequence[Directive] | None = None) -> Json:
        """The `leyline` object itself: for a body that is put together by hand, and for SGLang's
        `custom_params` in `sampling_params`."""
        asked = {"attention": True} if self.attention else {}
        return {"session": self.name, **asked, **self._edit_options(directives)}

    def edit(
        self,
        client: Any,
        *,
        messages: Sequence[Any] | None = None,
        directives: Sequence[Directive] | None = None,
        **fields: Any,
    ) -> Json:
        """Arguments for `client.post` that edit the session now, while a tool runs, so that the
        next request finds it done: `report_of(client.post(**session.edit(client, …)))`.

        client: of either SDK, async ones too. messages: what the conversation is to be, as the
        server sees it (OpenAI's shape). The session's policy edits these, and is left out where
        there are none. fields: others of the body, `tools` or a `prompt` say.
        """
        options = self._edit_options(directives)
        if messages is None:
            options.pop("policy", None)
        body = {**options, **fields}
        if messages is not None:
            body["messages"] = list(messages)
        below = str(client.base_url).rstrip("/").endswith("/v1")
        path = f"{'' if below else '/v1'}/leyline/sessions/{in_path(self.name)}/directives"
        return {"path": path, "body": body, "cast_to": object}

    def _edit_options(self, directives: Sequence[Directive] | None) -> Json:
        given: Json = {}
        if self.policy is not None:
            policy = {"name": self.policy} if isinstance(self.policy, str) else self.policy
            given["policy"] = policy if isinstance(policy, Mapping) else list(policy)
        if self.mode != Mode.AMORTIZE:
            given["mode"] = str(self.mode)
        if self.repair is not None:
            given["repair"] = self.repair
        if directives is not None:
            given["directives"] = [_as_json(each) for each in directives]
        return given | {name: True for name in ("strict", "scrub") if getattr(self, name)}


def in_path(session: str) -> str:
    """A session's name as one part of a path."""
    # Dots too: clients take `..` for the folder above.
    return quote(session, safe="").replace(".", "%2E")


def report_of(answer: Any) -> Report | None:
    """The report in an answer, a chunk or event of a stream, or their JSON; None if it has none."""
    raw = _raw_report(answer)
    if raw is None:
        return None
    tokens = raw["tokens"]
    return Report(
        prompt=tokens["prompt"],
        shared=tokens["shared"],
        moved=tokens["moved"],
        computed=tokens["computed"],
        session=raw["session"],
        edits=tuple(
            EditReport(
                start=edit["start"],
                end=edit["end"],
                replacement_tokens=edit["replacement_tokens"],
                shift=edit["shift"],
                mode=Mode(edit["mode"]),
            )
            for edit in raw["edits"]
        ),
        copied=raw.get("copied", False),
        fallback=None if raw["fallback"] is None else Fallback(raw["fallback"]),
        splice_ms=raw["splice_ms"],
        forgotten=raw.get("forgotten", 0),
        kept_by_others=raw.get("kept_by_others", 0),
    )


def policies_of(answer: Any) -> tuple[Applied, ...]:
    """What the server's policies did to the messages, in the order asked for; likewise."""
    raw = _raw_report(answer) or {}
    return tuple(
        Applied(
            each["name"],
            each["tool_uses"],
            each["thinking_turns"],
            each["messages"],
            each["tokens"],
        )
        for each in raw.get("policy", ())
    )


def attention_of(answer: Any) -> list[float | None] | None:
    """The part of an average query's attention that each message got, for `heavy_hitters`; of each
    token where the prompt was no chat. None for a message that a policy dropped, and for an answer
    that was not asked for it; likewise."""
    return (_raw_report(answer) or {}).get("attention")


class Watched(Generic[Chunk]):
    """A stream, chunk by chunk as it comes; `report` is there once it has ended.

    stream: what the SDK's `create(stream=True)` gives, sync or async.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.report: Report | None = None

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._stream:
            self.report = report_of(chunk) or self.report
            yield chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        async for chunk in self._stream:
            self.report = report_of(chunk) or self.report
            yield chunk


def _raw_report(answer: Any) -> Json | None:
    """Where SDKs put fields that they don't know, or where plain JSON has them."""
    found = answer if isinstance(answer, Mapping) else getattr(answer, "model_extra", None) or {}
    if "tokens" in found and "session" in found:  # of Session.edit
        return dict(found)
    raw = found.get("leyline")
    if raw is None and isinstance(found.get("meta_info"), Mapping):  # of SGLang's /generate
        raw = found["meta_info"].get("leyline")
    if isinstance(raw, list):
        raw = raw[0] if raw else None
    return raw


def _as_json(directive: Directive) -> Json:
    given: Json = {
        "start": directive.start,
        "end": directive.end,
        "replacement": list(directive.replacement),
        "mode": str(directive.mode),
    }
    return given | ({"repair": directive.repair} if directive.mode == Mode.REPAIR else {})

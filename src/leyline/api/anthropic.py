"""Requests of Anthropic's Messages API, as far as they are served.

As with the OpenAI API, a field that is not supported and would change the answer is refused.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from leyline.api.anthropic_messages import check_conversation, check_system, to_chat
from leyline.api.context_management import Rules, parse_context_management
from leyline.api.errors import FieldError, parse
from leyline.api.messages import Message
from leyline.api.openai import Common, check_template_kwargs, supported, with_leyline
from leyline.policy.errors import short

MAX_STOP_SEQUENCES = 64

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # Each with the values that change nothing; null always is one.
    "stop": (),  # it is called stop_sequences here
    "container": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "compaction": (),
    "fallbacks": ([],),
    "thread": (),
    "speed": ("standard",),
}


class CountRequest(Common):
    """What both routes have in common: a conversation, and how it is to be edited."""

    system: Any = None
    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    context_management: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_conversation(self) -> CountRequest:
        self.system = check_system(self.system)
        self.messages = check_conversation(self.messages)
        self.tools = _tools(self.tools)
        _check_choice(self.tool_choice)
        _check_thinking(self.thinking)
        check_template_kwargs(self.chat_template_kwargs or {})
        if self.context_management is not None:
            self.context_management = parse_context_management(self.context_management)
        return self

    @property
    def alternatives(self) -> int | None:
        return None

    @property
    def rules(self) -> Rules | None:
        """The checked `context_management`."""
        return self.context_management

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            kwargs.setdefault("enable_thinking", self.thinking["type"] != "disabled")
        return kwargs

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools to tell the model of, as chat templates know them."""
        none = self.tool_choice is not None and self.tool_choice["type"] == "none"
        return None if none else self.tools or None

    def chat(self, messages: list[Message]) -> list[Message]:
        """These messages, Anthropic's, behind the system prompt, as chat messages."""
        return to_chat(self.system, messages)


class MessagesRequest(CountRequest):
    stop_sequences: Any = None

    @model_validator(mode="after")
    def _check_answer(self) -> MessagesRequest:
        if self.max_tokens is None:
            raise FieldError("max_tokens", "is missing.", "missing_required_parameter")
        self.stop = _stop_sequences(self.stop_sequences)
        return self


def parse_messages(body: object) -> MessagesRequest:
    """A request for an answer from untrusted data. Raises FieldError."""
    return with_leyline(parse(MessagesRequest, supported(body, UNSUPPORTED)))


def parse_count(body: object) -> CountRequest:
    """A request for a count from untrusted data. Raises FieldError."""
    return with_leyline(parse(CountRequest, supported(body, UNSUPPORTED)))


def _tools(given: object) -> list[dict[str, Any]]:
    """Tools as the OpenAI API and chat templates have them."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise FieldError("tools", f"must be a list, not {short(given)}.")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]


def _tool(tool: object, field: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise FieldError(field, f"must be an object, not {short(tool)}.")
    if tool.get("type") not in (None, "custom"):
        what = f"{short(tool['type'])} is not supported, only custom tools are."
        raise FieldError(f"{field}.type", what, "unsupported_parameter")
    name, schema, about = tool.get("name"), tool.get("input_schema"), tool.get("description")
    if not isinstance(name, str) or not name:
        raise FieldError(f"{field}.name", f"must be text, not {short(name)}.")
    if not isinstance(schema, dict):
        raise FieldError(f"{field}.input_schema", f"must be an object, not {short(schema)}.")
    if about is not None and not isinstance(about, str):
        raise FieldError(f"{field}.description", f"must be text, not {short(about)}.")
    function = {"name": name} | ({} if about is None else {"description": about})
    return {"type": "function", "function": {**function, "parameters": schema}}


def _check_choice(choice: object) -> None:
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if not isinstance(choice, dict) or kind not in ("auto", "none"):
        what = f"{short(kind)} is not supported, only the types auto and none are."
        raise FieldError("tool_choice", what, "unsupported_parameter")
    if choice.get("disable_parallel_tool_use"):
        where = "tool_choice.disable_parallel_tool_use"
        raise FieldError(where, "true is not supported; leave it out.", "unsupported_parameter")


def _check_thinking(thinking: object) -> None:
    kinds = ("enabled", "adaptive", "disabled")
    if thinking is None:
        return
    if not isinstance(thinking, dict):
        raise FieldError("thinking", f"must be an object, not {short(thinking)}.")
    if thinking.get("type") not in kinds:
        what = f"must be {', '.join(kinds[:-1])} or {kinds[-1]}, not {short(thinking.get('type'))}."
        raise FieldError("thinking.type", what)


def _stop_sequences(given: object) -> tuple[str, ...]:
    field = "stop_sequences"
    if given is None:
        return ()
    if not isinstance(given, list):
        raise FieldError(field, f"must be a list of texts, not {short(given)}.")
    if len(given) > MAX_STOP_SEQUENCES:
        raise FieldError(field, f"may be up to {MAX_STOP_SEQUENCES}, not {len(given)}.")
    for i, stop in enumerate(given):
        if not isinstance(stop, str) or not stop:
            what = f"must be text of at least a character, not {short(stop)}."
            raise FieldError(f"{field}[{i}]", what)
    return tuple(given)

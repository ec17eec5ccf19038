"""What an edit is to make of a session, as tokens: rendered and tokenized by SGLang itself, as it
does for the requests that come after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leyline.api.errors import FieldError
from leyline.api.sessions import EditRequest
from leyline.sglang.request import Refused


@dataclass(frozen=True, slots=True)
class Target:
    """field: what it was given by."""

    ids: list[int]
    field: str


async def target_of(serving: Any, options: EditRequest) -> Target | None:
    """None for an edit by directives alone. serving: SGLang's OpenAIServingTokenize. Raises
    FieldError, Refused."""
    from starlette.concurrency import run_in_threadpool

    if options.messages is None and options.prompt is None:
        return None
    field = "prompt" if options.messages is None else "messages"
    manager = serving.tokenizer_manager
    ids = options.prompt
    if not isinstance(ids, list):
        if manager.tokenizer is None:
            what = "needs a tokenizer, and this server has none; send a prompt of token ids."
            raise FieldError(field, what)
        # A long one takes a while; other requests go on.
        make = _rendered if options.messages is not None else _encoded
        ids = await run_in_threadpool(make, serving, options)
    _check(ids, field, manager)
    return Target(ids, field)


def _encoded(serving: Any, options: EditRequest) -> list[int]:
    return list(serving.tokenizer_manager.tokenizer(options.prompt)["input_ids"])


def _rendered(serving: Any, options: EditRequest) -> list[int]:
    """The messages through the chat template. The conversation goes on with what the tools say: no
    turn of the assistant is opened, where SGLang can leave it."""
    from pydantic import ValidationError
    from sglang.srt.entrypoints.openai.protocol import TokenizeRequest

    chat = serving.chat_serving
    is_jinja = chat.template_manager.chat_template_name is None and chat.chat_encoding_spec is None
    given = {
        "model": options.model,
        "messages": options.messages,
        "tools": options.tools or None,
        "chat_template_kwargs": options.chat_template_kwargs,
        "add_generation_prompt": False if is_jinja else None,
    }
    try:
        request = TokenizeRequest(**{k: v for k, v in given.items() if v is not None})
        return list(serving._tokenize_chat_request(request))
    except ValidationError as error:
        flaw = error.errors(include_url=False)[0]
        field = str(flaw["loc"][0]) if flaw["loc"] else "messages"
        raise FieldError(field, f"{flaw['msg']}.") from None
    except ValueError as error:
        raise FieldError("messages", f"SGLang refuses them: {error}") from None


def _check(ids: list[int], field: str, manager: Any) -> None:
    """Refuse what can't be run, before it is queued."""
    if not ids:
        raise Refused(f"{field}: must have at least one token", 400, field, "bad_prompt")
    vocab = manager.model_config.vocab_size
    bad = next((each for each in (min(ids), max(ids)) if not 0 <= each < vocab), None)
    if bad is not None:
        what = f"{field}: {bad} is no token of this model (0 to {vocab - 1})"
        raise Refused(what, 400, field, "unknown_token")
    most = min(manager.context_len, manager.max_req_input_len or manager.context_len)
    if len(ids) + manager.num_reserved_tokens >= most:
        what = f"{field}: {len(ids)} tokens, but this server takes less than {most}"
        raise Refused(what, 400, field, "context_length_exceeded")

"""A request with a `leyline` object, on its way through SGLang's TokenizerManager.

All requests come this way: of the HTTP server's endpoints and of an offline Engine. The hooks here
check the object before anything goes to the scheduler, and set the report in the answers'
`meta_info`.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import MISSING, dataclass, fields
from typing import Any

from leyline.api.errors import FieldError
from leyline.api.leyline_object import LeylineObject
from leyline.sglang.carriers import (
    KEY,
    Ahead,
    carrier,
    continuing,
    is_enabled,
    mentions,
    put,
    take,
)

Report = dict[str, Any]

_ANSWER_FIELDS = (
    # What a request wants to know, beside the text.
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "return_text_in_logprobs",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_prompt_token_ids",
    # How tokens are drawn, beside `sampling_params`.
    "custom_logit_processor",
    "watermark",
    "max_thinking_tokens",
    "require_reasoning",
    "stream",
    "rid",
)


class Refused(ValueError):
    """A request that gets no answer because of its `leyline` object.

    `status_code` is HTTP's, `param` the field, `code` one word for programs.
    """

    def __init__(
        self, message: str, status_code: int = 400, param: str | None = None, code: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.param = param
        self.code = code or None

    @classmethod
    def of(cls, error: FieldError) -> Refused:
        """A malformed field."""
        return cls(str(error), 400, error.field or None, error.code)


@dataclass
class Exchange:
    """What the HTTP middleware and these hooks tell each other about one request.

    given: the top-level object. ahead: it is an edit of a session route. report, failure: what
    became of it.
    """

    given: LeylineObject | None = None
    ahead: Ahead | None = None
    report: Report | None = None
    failure: Refused | None = None


def generate_request(
    original: Callable[..., AsyncGenerator[Any, None]], manager: Any, obj: Any, request: Any = None
) -> AsyncGenerator[Any, None]:
    """AROUND `TokenizerManager.generate_request`: the one way that all requests take."""
    scope = getattr(request, "scope", None)
    exchange = scope.get(KEY) if isinstance(scope, Mapping) else None
    given = exchange.given if exchange is not None else None
    if given is None and not mentions(obj):
        return original(manager, obj, request)
    return _with_objects(original, manager, obj, request, exchange or Exchange())


def update_request_meta_info(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list[Any]],
    index: int,
    finish_reason: Any,
) -> None:
    """AROUND `TokenizerManager.update_request_meta_info`: answers come in batches, and only those
    with a report of their own are to have a `leyline` (I1)."""
    if KEY in customized_info and not customized_info[KEY][index]:
        customized_info = {key: each for key, each in customized_info.items() if key != KEY}
    original(manager, meta_info, state, customized_info, index, finish_reason)


async def handle_abort_finish_reason(
    original: Callable[..., Any], manager: Any, out: dict[str, Any], state: Any, is_stream: bool
) -> dict[str, Any] | None:
    """AROUND `TokenizerManager._handle_abort_finish_reason`: what the scheduler refuses of a
    request with a `leyline` object is raised, streamed or not, so that the client gets a status.

    Of a batch that is streamed, the other prompts go on, and SGLang says it in a chunk.
    """
    refused = _refusal(out["meta_info"]["finish_reason"]) if mentions(state.obj) else None
    if refused is None or (is_stream and not getattr(state.obj, "is_single", False)):
        return await original(manager, out, state, is_stream)
    # As for a stream: it tidies up and raises nothing of its own.
    if await original(manager, out, state, True) is None:
        return None
    raise refused


async def _with_objects(
    original: Callable[..., AsyncGenerator[Any, None]],
    manager: Any,
    obj: Any,
    request: Any,
    exchange: Exchange,
) -> AsyncGenerator[Any, None]:
    """The answers to a request with objects, each with its report."""
    try:
        objects = take(obj, exchange.given, is_enabled())
        put(obj, [None if each is None else carrier(each, exchange.ahead) for each in objects])
        answers = _Answers(exchange, _samples(obj))
        if answers.samples > 1:
            # The edits are the prompt's, once; what is drawn from it afterwards only goes on in
            # the session. SGLang computes the prompt by a request of its own here too, whose
            # answer it drops, and by then there would be nothing left to report.
            outs = await only(original(manager, _prompt_only(obj), request))
            answers.keep(outs)
            put(obj, [None if each is None else continuing(each) for each in objects])
        async with aclosing(original(manager, obj, request)) as stream:
            async for out in stream:
                answers.report(out)
                yield out
    except FieldError as error:
        exchange.failure = Refused.of(error)
        raise exchange.failure from None
    except Refused as error:
        exchange.failure = error
        raise
    finally:
        if not hasattr(obj, "is_single"):
            # SGLang aborts a stream that has ended by these, which it had not set yet.
            obj.is_single, obj.rid = True, None


class _Answers:
    """Sets the reports of one request's answers: a dict where the scheduler sent a list of one."""

    def __init__(self, exchange: Exchange, samples: int) -> None:
        """samples: drawn for each prompt."""
        self.samples = samples
        self._exchange = exchange
        self._kept: dict[int, Report] = {}

    def keep(self, outs: Any) -> None:
        """Take the reports of the prompts alone, for all that is drawn from them."""
        for i, out in enumerate(outs if isinstance(outs, list) else [outs]):
            if reports := out["meta_info"].get(KEY):
                self._keep(i, reports[0])

    def report(self, out: Any) -> None:
        """Set the report of an answer, of each in a list, or of a chunk; of the last chunk too."""
        if isinstance(out, list):
            for i, each in enumerate(out):
                self._report(i, each)
        else:
            self._report(out.get("index", 0), out)

    def _report(self, index: int, out: dict[str, Any]) -> None:
        meta = out["meta_info"]
        reports = meta.pop(KEY, None)
        at = index // self.samples
        if reports and at not in self._kept:
            self._keep(at, reports[0])
        if at in self._kept and (reports or meta.get("finish_reason")):
            meta[KEY] = self._kept[at]

    def _keep(self, at: int, report: Report) -> None:
        self._kept[at] = report
        if at == 0:
            self._exchange.report = report


def _samples(obj: Any) -> int:
    """Answers to draw from each prompt. Beams are none: they are one request to the scheduler."""
    params = obj.sampling_params
    first = (params or [None])[0] if isinstance(params, list) else params
    if not isinstance(first, dict) or (first.get("beam_width") or 1) != 1:
        return 1
    n = first.get("n", 1)
    return n if isinstance(n, int) and n > 1 else 1


def _prompt_only(obj: Any) -> Any:
    """The same prompts under the same cache keys, with nothing to draw."""
    out = copy.copy(obj)
    for each in fields(obj):
        if each.name in _ANSWER_FIELDS and each.default is not MISSING:
            setattr(out, each.name, each.default)
    out.log_metrics = False
    many = isinstance(obj.sampling_params, list)
    params = [
        {
            "max_new_tokens": 0,
            "min_new_tokens": 0,
            "custom_params": (each or {}).get("custom_params"),
        }
        for each in (obj.sampling_params if many else [obj.sampling_params])
    ]
    out.sampling_params = params if many and not _is_single(obj) else params[0]
    return out


def _is_single(obj: Any) -> bool:
    """Whether it has one prompt that is no list of prompts."""
    if obj.text is not None:
        return isinstance(obj.text, str)
    return bool(obj.input_ids) and isinstance(obj.input_ids[0], int)


async def only(answers: AsyncGenerator[Any, None]) -> Any:
    """The answer of a request that is not streamed."""
    async with aclosing(answers) as stream:
        return await anext(stream)


def _refusal(reason: object) -> Refused | None:
    """An abort with a 400, 404 or 409 as an error. Its `err_type` may be `leyline.` and a word."""
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return None
    message, status = str(reason.get("message")), reason.get("status_code")
    if status not in (400, 404, 409):
        return None
    owner, _, word = str(reason.get("err_type")).partition(".")
    field, _, _ = message.partition(": ")
    param = field if field.startswith(KEY) and " " not in field else None
    if status == 409:
        param = f"{KEY}.strict"
    return Refused(message, int(status), param, word if owner == KEY else "")

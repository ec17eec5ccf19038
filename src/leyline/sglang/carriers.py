"""Where the `leyline` object stands in a request: found, checked and taken out of SGLang's
GenerateReqInput, and set there for the scheduler.

It comes in `custom_params` (an object or a JSON string), as the payload of a KV hint, or at the top
level of a request to `/v1/…` (http.py). It goes on as a JSON string in `custom_params`, which every
transport between SGLang's processes carries.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import pydantic_core

from leyline.api.errors import FieldError
from leyline.api.leyline_object import LeylineObject, parse_leyline
from leyline.policy.errors import short

KEY = "leyline"
"""In `custom_params`, and wherever else the object or its report has a name."""
HINT = "leyline.edit"
"""The type of a KV hint's action."""
BACKEND = "leyline"
"""`--radix-cache-backend`."""

_AHEAD = "ahead"
"""Beside the object's own fields, which a client's may not have."""


class Ahead(StrEnum):
    """An edit made now, ahead of the request that will need it: it generates nothing."""

    PROMPT = "prompt"
    """The request has the prompt that the session is to have."""
    SOURCE = "source"
    """Only directives: the prompt is what they make of the session's source."""


Place = tuple[str, int | None, Any]
"""Where it stands, the prompt it is for (None: for all), what stands there."""


def is_enabled() -> bool:
    """Whether this server's cache is Leyline's."""
    # Not at the top: every process loads this file.
    from sglang.srt.runtime_context import get_memory

    return get_memory().radix_cache_backend == BACKEND


def check_enabled(enabled: bool) -> None:
    """Raises FieldError for a server without Leyline's cache."""
    if not enabled:
        what = f"this server was started without `--radix-cache-backend {BACKEND}`; leave it out."
        raise FieldError(KEY, what, "unsupported_parameter")


def parse_object(raw: object, enabled: bool = True) -> LeylineObject:
    """The object from untrusted data, which may be a JSON string. Raises FieldError."""
    check_enabled(enabled)
    try:
        found = parse_leyline(_loaded(raw))
    except RecursionError:
        raise FieldError(KEY, "is nested too deeply.") from None
    if found.attention:
        what = "is not known here: SGLang's kernels keep it to themselves; leave it out."
        raise FieldError(f"{KEY}.attention", what, "unsupported_parameter")
    return found


def parse_carried(raw: object, enabled: bool) -> tuple[LeylineObject, Ahead | None]:
    """The object as `carrier` made it. Raises FieldError."""
    raw = _loaded(raw)
    ahead = raw.pop(_AHEAD, None) if isinstance(raw, dict) else None
    return parse_object(raw, enabled), None if ahead is None else Ahead(ahead)


def _loaded(raw: object) -> object:
    if not isinstance(raw, str):
        return raw
    try:
        return pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise FieldError(KEY, f"is not JSON: {error}.", "invalid_json") from None


def carrier(obj: LeylineObject, ahead: Ahead | None = None) -> str:
    """What goes to the scheduler: the checked object without its policy, as JSON."""
    out: dict[str, Any] = {
        **({} if ahead is None else {_AHEAD: ahead}),
        "session": obj.session,
        "mode": obj.mode,
        "repair": obj.repair,
        "strict": obj.strict,
        "scrub": obj.scrub,
    }
    if obj.edits is not None:
        out["directives"] = [
            {
                "start": edit.start,
                "end": edit.end,
                "replacement": edit.replacement,
                "mode": edit.mode,
                "repair": edit.repair,
            }
            for edit in obj.edits
        ]
    return json.dumps(out)


def continuing(obj: LeylineObject) -> str:
    """What goes to the scheduler for a request that only goes on in the object's session."""
    return carrier(parse_leyline({"session": obj.session}))


def take(
    obj: Any, given: LeylineObject | None = None, enabled: bool = True
) -> list[LeylineObject | None]:
    """Move the objects out of a GenerateReqInput, before SGLang normalizes it: one a prompt.

    given: the top-level object. Raises FieldError; then `obj` is as it was.
    """
    count = _prompts(obj)
    places = [*_in_params(obj), *_in_hints(obj)]
    if given is not None:
        places.insert(0, ("at the top level", None, given))
    found: list[tuple[str, LeylineObject] | None] = [None] * count
    for where, index, raw in places:
        if index is None and count > 1:
            raise FieldError(
                KEY,
                f"is given {where} for {count} prompts, and a session takes one at a time; "
                "send one request each, or a list of sampling_params, each with its own.",
            )
        at = index or 0
        if at >= count:
            continue  # more parameters than prompts, which SGLang refuses
        before = found[at]
        if before is not None:
            raise FieldError(KEY, f"is given twice, {before[0]} and {where}; send it once.")
        parsed = raw if isinstance(raw, LeylineObject) else parse_object(raw, enabled)
        if parsed.policy is not None:
            what = "edits messages, and here are none; send it at the top level of a chat request."
            raise FieldError(f"{KEY}.policy", what, "invalid_policy")
        found[at] = where, parsed
    objects = [None if each is None else each[1] for each in found]
    _check_sessions(objects)
    put(obj, [None] * count)
    obj.kv_hints = _without_action(getattr(obj, "kv_hints", None))
    return objects


def put(obj: Any, carriers: Sequence[str | None]) -> None:
    """Set what each prompt of a GenerateReqInput tells the scheduler; None takes it away.

    `sampling_params` may be the caller's own: it is replaced, never changed.
    """
    params = obj.sampling_params
    if isinstance(params, list):
        texts = [*carriers, *[None] * (len(params) - len(carriers))]
        pairs = zip(params, texts, strict=False)  # SGLang refuses numbers that don't go together
        obj.sampling_params = [_with_carrier(each, text) for each, text in pairs]
    elif len(carriers) == 1 or not any(carriers):
        obj.sampling_params = _with_carrier(params, carriers[0])
    else:
        obj.sampling_params = [_with_carrier(params or {}, text) for text in carriers]


def mentions(obj: Any) -> bool:
    """Whether there is an object somewhere in a request. Cheap: every request is asked."""
    params = getattr(obj, "sampling_params", None)
    for each in params if isinstance(params, list) else (params,):
        custom = each.get("custom_params") if isinstance(each, dict) else None
        if isinstance(custom, dict) and KEY in custom:
            return True
    hints = getattr(obj, "kv_hints", None)
    return bool(hints) and any(_in_hints(obj))


def _prompts(obj: Any) -> int:
    """How many prompts it has, told by what SGLang tells it by."""
    if obj.text is not None:
        return 1 if isinstance(obj.text, str) else max(1, len(obj.text))
    prompts = obj.input_ids if obj.input_ids is not None else obj.input_embeds
    if not prompts or isinstance(prompts[0], int):
        return 1
    if obj.input_ids is None and prompts[0] and isinstance(prompts[0][0], float):
        return 1  # rows of one prompt
    return len(prompts)


def _in_params(obj: Any) -> list[Place]:
    params = obj.sampling_params
    many = isinstance(params, list)
    out: list[Place] = []
    for i, each in enumerate(params if many else [params]):
        custom = each.get("custom_params") if isinstance(each, dict) else None
        if isinstance(custom, dict) and custom.get(KEY) is not None:
            out.append(("in custom_params", i if many else None, custom[KEY]))
    return out


def _in_hints(obj: Any) -> list[Place]:
    hints: Any = getattr(obj, "kv_hints", None)  # an embedding request has none
    many = isinstance(hints, list)
    return [
        ("in kv_hints", i if many else None, _field(action, "payload"))
        for i, envelope in enumerate(hints if many else [hints])
        for action in _actions(envelope)
        if _field(action, "action_type") == HINT
    ]


def _without_action(hints: Any) -> Any:
    """KV hints without Leyline's; whatever is malformed stays for SGLang to refuse."""
    if isinstance(hints, list):
        return [_without_action(each) for each in hints]
    actions = _actions(hints)
    rest = [action for action in actions if _field(action, "action_type") != HINT]
    if len(rest) == len(actions):
        return hints
    if not rest:
        return None
    if isinstance(hints, dict):
        return {**hints, "actions": rest}
    return type(hints)(
        protocol_version=hints.protocol_version, message_id=hints.message_id, actions=rest
    )


def _actions(envelope: Any) -> list[Any]:
    actions = _field(envelope, "actions")
    return actions if isinstance(actions, list) else []


def _field(thing: Any, name: str) -> Any:
    """Of a dict as it came, or of SGLang's struct."""
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)


def _with_carrier(params: Any, text: str | None) -> Any:
    if params is not None and not isinstance(params, dict):
        return params  # for SGLang to refuse
    custom = (params or {}).get("custom_params")
    if custom is not None and not isinstance(custom, dict):
        if text is None:
            return params
        what = f"must be an object, not {short(custom)}."
        raise FieldError("sampling_params.custom_params", what)
    rest = {key: value for key, value in (custom or {}).items() if key != KEY}
    if text is not None:
        rest[KEY] = text
    if not rest and not custom:
        return params
    return {**(params or {}), "custom_params": rest or None}


def _check_sessions(objects: Sequence[LeylineObject | None]) -> None:
    seen = set()
    for each in objects:
        if each is None:
            continue
        if each.session in seen:
            what = f"{short(each.session)} has two prompts here; it takes one at a time."
            raise FieldError(f"{KEY}.session", what)
        seen.add(each.session)

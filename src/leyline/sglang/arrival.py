"""A request reaches the scheduler: its `leyline` object becomes a `Turn`, or an error."""

from __future__ import annotations

import json
from array import array
from http import HTTPStatus
from typing import Any

from leyline.api.errors import FieldError
from leyline.channel import Fallback, StrictFallback, check_strict
from leyline.directive import DirectiveError
from leyline.sglang.carriers import KEY, parse_object
from leyline.sglang.report import publish
from leyline.sglang.turn import Turn


def asked_of(req: Any) -> Turn | None:
    """The request's turn, if it names a session."""
    return getattr(req, "leyline", None)


def turn_of(req: Any) -> Turn | None:
    """The same, if the request can be spliced."""
    turn = asked_of(req)
    return turn if turn is not None and turn.unsupported is None else None


def on_arrival(req: Any, scheduler: Any, received: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler._create_generation_req`."""
    carried = (req.sampling_params.custom_params or {}).get(KEY)
    if carried is None:
        return
    from leyline.sglang.cache import LeylineRadixCache

    cache = scheduler.tree_cache
    try:
        asked = parse_object(carried, enabled=isinstance(cache, LeylineRadixCache))
        # Rows are found in these namespaces, so sessions live in them too.
        owner = json.dumps([req.extra_key, req.cache_salt])
        channel = asked.channel(asked.session, owner)
        turn = Turn(channel, cache.sessions.number(channel.user), _unsupported(req, received))
        if turn.unsupported is not None:
            turn.plan_unsupported(len(req.origin_input_ids), 0)
            check_strict(channel, Fallback.UNSUPPORTED_FEATURE)
    except StrictFallback as error:
        what = f"{error.message}. A splice doesn't go with {turn.unsupported}."
        refuse(req, StrictFallback(error.reason, what))
    except (FieldError, DirectiveError) as error:
        refuse(req, error)
    else:
        req.leyline = turn
        publish(req, turn)


def refuse(req: Any, error: FieldError | DirectiveError | StrictFallback) -> None:
    """End the request with HTTP 400 or 409; nothing of it is prefilled."""
    req.leyline = None
    if isinstance(error, StrictFallback):
        status, word, message = HTTPStatus.CONFLICT, error.reason, error.message
    else:
        status, word, message = HTTPStatus.BAD_REQUEST, "invalid_directive", str(error)
    if isinstance(error, DirectiveError):
        message = f"{KEY}.{message}"
    req.set_finish_with_abort(message, status_code=status, err_type=f"{KEY}.{word}")
    req.full_untruncated_fill_ids = array("q", req.origin_input_ids)


def _unsupported(req: Any, received: Any) -> str | None:
    """What of the request a splice doesn't go with."""
    features = {
        "images, audio or video": received.mm_inputs is not None,
        "input embeddings": received.input_embeds is not None,
        "embedding overrides": req.positional_embed_overrides is not None,
        "log-probabilities of the prompt": received.return_logprob
        and received.logprob_start_len is not None
        and 0 <= received.logprob_start_len < len(req.origin_input_ids),
        "beam search": (received.sampling_params.beam_width or 1) > 1,
        "SGLang's own sessions": received.session_params is not None
        or received.session_id is not None,
    }
    return next((name for name, asked in features.items() if asked), None)

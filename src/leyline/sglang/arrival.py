"""A request reaches the scheduler: its `leyline` object becomes a `Turn`, or an error."""

from __future__ import annotations

from array import array
from http import HTTPStatus
from typing import Any

import numpy as np

from leyline.api.errors import FieldError
from leyline.channel import EngineError, Fallback, StrictFallback, check_strict
from leyline.directive import DirectiveError
from leyline.sglang.carriers import KEY, Ahead, parse_carried
from leyline.sglang.report import publish
from leyline.sglang.sessions import PUBLIC, owner_of
from leyline.sglang.turn import Turn


def asked_of(req: Any) -> Turn | None:
    """The request's turn, if it names a session."""
    return getattr(req, "leyline", None)


def turn_of(req: Any) -> Turn | None:
    """The same, if the request can be spliced."""
    turn = asked_of(req)
    return turn if turn is not None and turn.unsupported is None else None


def number_of(req: Any) -> int:
    """Whose rows a request's are."""
    turn = asked_of(req)
    return PUBLIC if turn is None else turn.number


def on_arrival(req: Any, scheduler: Any, received: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler._create_generation_req`."""
    from leyline.sglang.cache import LeylineRadixCache

    cache = scheduler.tree_cache
    enabled = isinstance(cache, LeylineRadixCache)
    if enabled and received.mm_inputs is None and _refused_tokens(req, cache.vocab_size):
        return
    carried = (req.sampling_params.custom_params or {}).get(KEY)
    if carried is None:
        return
    try:
        asked, ahead = parse_carried(carried, enabled)
        channel = asked.channel(asked.session, owner_of(req.extra_key, req.cache_salt))
        turn = Turn(
            channel,
            cache.sessions.number(channel.user),
            _unsupported(req, received),
            ahead=ahead is not None,
        )
        if ahead is Ahead.SOURCE:
            _take_prompt(req, turn, cache, scheduler.max_req_input_len)
        if turn.unsupported is not None:
            turn.plan_unsupported(len(req.origin_input_ids), 0)
            check_strict(channel, turn.reuse.fallback)
    except StrictFallback as error:
        what = f"{error.message}. A splice doesn't go with {turn.unsupported}."
        refuse(req, StrictFallback(error.reason, what))
    except (FieldError, DirectiveError, EngineError) as error:
        refuse(req, error)
    else:
        req.leyline = turn
        publish(req, turn)


def refuse(req: Any, error: FieldError | DirectiveError | EngineError) -> None:
    """End the request with HTTP 400, 404 or 409; nothing of it is prefilled."""
    req.leyline = None
    if isinstance(error, EngineError):
        status, word, message = _status(error), str(error.reason), error.message
    else:
        status, word, message = HTTPStatus.BAD_REQUEST, "invalid_directive", str(error)
    if isinstance(error, DirectiveError):
        message = f"{KEY}.{message}"
    _end(req, message, status, f"{KEY}.{word}")


def _status(error: EngineError) -> HTTPStatus:
    if isinstance(error, StrictFallback):
        return HTTPStatus.CONFLICT
    missing = error.reason == Fallback.SOURCE_MISSING
    return HTTPStatus.NOT_FOUND if missing else HTTPStatus.BAD_REQUEST


def _take_prompt(req: Any, turn: Turn, cache: Any, most: int) -> None:
    """Make the prompt of an edit by directives alone, while SGLang has not looked at it. Raises
    EngineError, DirectiveError."""
    channel = turn.channel
    lineage = cache.sessions.lineages.get(*channel.user)
    if lineage is None:
        what = f"session {channel.session!r} has nothing cached here to edit; send its prompt"
        raise EngineError(Fallback.SOURCE_MISSING, what)
    prompt = turn.make_prompt(lineage, cache.vocab_size)
    if len(prompt) >= most:
        what = f"the edited sequence has {len(prompt)} tokens; here it may have {most - 1}"
        raise EngineError("context_length_exceeded", what)
    tokens = array("q", np.ascontiguousarray(prompt, dtype=np.int64).tobytes())
    req.origin_input_ids = req.origin_input_ids_unpadded = tokens


def _end(req: Any, message: str, status: HTTPStatus, kind: str) -> None:
    req.set_finish_with_abort(message, status_code=status, err_type=kind)
    req.full_untruncated_fill_ids = array("q", req.origin_input_ids)


def _refused_tokens(req: Any, vocab_size: int) -> bool:
    """Whether the prompt was refused for a token that the model hasn't. Also for a request without
    a session: a marked key has such tokens, and nobody may ask for one (I8)."""
    tokens = np.asarray(req.origin_input_ids, dtype=np.int64)
    if not len(tokens) or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return False
    bad = next(int(token) for token in tokens if not 0 <= token < vocab_size)
    message = f"input_ids: {bad} is no token of this model (0 to {vocab_size - 1})"
    _end(req, message, HTTPStatus.BAD_REQUEST, "BadRequestError")
    return True


def _unsupported(req: Any, received: Any) -> str | None:
    """What of the request a splice doesn't go with."""
    features = {
        "images, audio or video": received.mm_inputs is not None,
        "input embeddings": received.input_embeds is not None,
        "embedding overrides": req.positional_embed_overrides is not None,
        "log-probabilities of the prompt": received.return_logprob
        and received.logprob_start_len is not None
        and 0 <= received.logprob_start_len < len(req.origin_input_ids),
        "routed experts or indexed rows of the prompt": getattr(
            received, "return_routed_experts", False
        )
        or getattr(received, "return_indexer_topk", False),
        "beam search": (received.sampling_params.beam_width or 1) > 1,
        "SGLang's own sessions": received.session_params is not None
        or received.session_id is not None,
    }
    return next((name for name, asked in features.items() if asked), None)

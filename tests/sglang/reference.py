"""What SGLang's tests expect, written down without the plugin: edits as cases, the rows they leave,
keys turned in fp64, and Transformers running what is left to run.

Nothing of `leyline.plan`, `leyline.reuse`, `leyline.rope` or `leyline.rotate` is used here.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import Rows, Server
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

OLD, NEW = range(3, 400), range(400, 508)
"""Tokens of sources and of replacements: no replacement can be mistaken for kept tokens."""


def tokens(seed: str | int, n: int, among: range = OLD) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(among) for _ in range(n)]


# -- servers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A server to start."""

    kind: str
    dtype: str
    page: int = 1
    flags: tuple[str, ...] = ()

    def start(self, servers: Any) -> Server:
        page = () if self.page == 1 else ("--page-size", str(self.page))
        return servers(self.kind, *page, *self.flags, dtype=self.dtype)

    def __str__(self) -> str:
        return f"{self.kind}-{self.dtype}-page{self.page}"


SMALL_CHUNKS = ("--chunked-prefill-size", "32")  # less than replacements and tails of some cases
SETUPS = [
    Setup("mla", "float32"),
    Setup("mla", "bfloat16", 16, (*SMALL_CHUNKS, "--disable-overlap-schedule")),
    Setup("gqa", "float32", 1, SMALL_CHUNKS),
    Setup("gqa", "float16", 16),
]
"""Together: both kinds of rows, pages, dtypes, chunks, and overlap on and off."""


# -- edits ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """Source tokens `[start, end)` give way to `new` others; then `repair` are computed again."""

    start: int
    end: int
    new: int = 0
    repair: int = 0


@dataclass(frozen=True)
class Case:
    """A source of so many tokens, its edits, and so many tokens that follow."""

    name: str
    source: int
    edits: tuple[Edit, ...]
    new: int = 8

    def prompts(self, salt: str = "") -> tuple[list[int], list[int]]:
        """Source and prompt; between them the case's edits are the only shortest ones."""
        source = tokens(self.name + salt, self.source)
        for edit in self.edits:
            if edit.start == edit.end:
                continue
            for cut, other in ((edit.start, edit.end), (edit.start - 1, edit.end - 1)):
                while 0 <= cut and other < len(source) and source[cut] == source[other]:
                    source[other] = OLD[(source[other] + 1 - OLD.start) % len(OLD)]
        return source, self.edited(source, salt)

    def edited(self, source: list[int], salt: str = "") -> list[int]:
        prompt, at = [], 0
        for i, edit in enumerate(self.edits):
            prompt += source[at : edit.start] + tokens(f"{self.name}{salt}{i}", edit.new, NEW)
            at = edit.end
        return prompt + source[at:] + tokens(f"{self.name}{salt} new", self.new, NEW)


@dataclass(frozen=True)
class Kept:
    """Source rows `[src, src + n)` at target positions from `dst` on."""

    src: int
    dst: int
    n: int


@dataclass(frozen=True)
class Expected:
    """shared: rows that stay. kept: those that enter behind them. amortized: where they begin."""

    shared: int
    kept: tuple[Kept, ...]
    prompt: int

    @property
    def moved(self) -> int:
        return sum(kept.n for kept in self.kept)

    @property
    def cached(self) -> int:
        return self.shared + self.moved

    @property
    def amortized(self) -> int:
        return self.kept[0].dst if self.kept else self.prompt

    @property
    def tokens(self) -> dict[str, int]:
        return {
            "prompt": self.prompt,
            "shared": self.shared,
            "moved": self.moved,
            "computed": self.prompt - self.cached,
        }


def expected(edits: Sequence[Edit], source: int, new: int, page: int = 1) -> Expected:
    """Of which source row each token of the prompt is, found token by token.

    source: rows of the source; only whole pages of them are cached.
    """
    held = source // page * page
    rows: list[int | None] = []
    at, repair = 0, 0
    for edit in [*edits, None]:
        for row in range(at, edit.start if edit else source):
            rows.append(None if repair or row >= held else row)
            repair = max(0, repair - 1)
        if edit:
            rows += [None] * edit.new
            repair = max(repair, edit.repair)
            at = edit.end
    rows += [None] * new
    rows[-1] = None  # its logits are needed
    shared = 0
    while rows[shared] == shared:
        shared += 1
    shared = shared // page * page
    kept: list[Kept] = []
    for dst, row in enumerate(rows):
        if row is None or dst < shared:
            continue
        last = kept[-1] if kept else None
        if last and (last.src + last.n, last.dst + last.n) == (row, dst):
            kept[-1] = Kept(last.src, last.dst, last.n + 1)
        else:
            kept.append(Kept(row, dst, 1))
    if len(kept) == 1 and kept[0].src == kept[0].dst == shared and kept[0].n < page:
        kept = []  # less than a page right behind the shared rows is computed
    return Expected(shared, tuple(kept), len(rows))


# -- rotation ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A checkpoint: which columns of its keys turn, and how, from the formulas of YaRN and Llama
    3."""

    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    @property
    def latent(self) -> int:
        """Columns of a row that don't turn, in front; 0 where rows are no latents."""
        return self.config.get("kv_lora_rank", 0)

    def inv_freq(self) -> Tensor:
        config = self.config
        if self.latent:
            return _yarn(config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"])
        settings = config["rope_parameters"]
        return _llama3(config["head_dim"], settings["rope_theta"], settings)

    def turned(self, keys: Tensor, by: int | Tensor) -> Tensor:
        """Keys `[tokens, heads, columns]` at `by` positions further on, fp64."""
        steps = torch.as_tensor(by, dtype=torch.float64).reshape(-1, 1, 1)
        angle = steps * self.inv_freq()
        cos, sin = angle.cos(), angle.sin()
        still, turns = keys.double().split([self.latent, keys.shape[-1] - self.latent], -1)
        if self.latent:
            x, y = turns[..., 0::2], turns[..., 1::2]
            both = torch.stack([x * cos - y * sin, x * sin + y * cos], -1).flatten(-2)
        else:
            x, y = turns.chunk(2, -1)
            both = torch.cat([x * cos - y * sin, x * sin + y * cos], -1)
        return torch.cat([still, both], -1)

    def first_keys(self, ids: Sequence[int], positions: Tensor) -> Tensor:
        """The first layer's keys of tokens at positions, from the weights, fp64."""
        weights, layer = _weights(self.folder), "model.layers.0."
        x = weights["model.embed_tokens.weight"][torch.tensor(ids)].double()
        x = _normed(x, weights[f"{layer}input_layernorm.weight"], self.config["rms_norm_eps"])
        if not self.latent:
            keys = x @ weights[f"{layer}self_attn.k_proj.weight"].double().T
            return self.turned(keys.unflatten(-1, (-1, self.config["head_dim"])), positions)
        row = x @ weights[f"{layer}self_attn.kv_a_proj_with_mqa.weight"].double().T
        norm = weights[f"{layer}self_attn.kv_a_layernorm.weight"]
        # SGLang's own DeepSeek code gives this norm its class's default epsilon.
        latent = _normed(row[:, : self.latent], norm, 1e-6)
        return self.turned(torch.cat([latent, row[:, self.latent :]], -1)[:, None], positions)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@cache
def _weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def _yarn(width: int, base: float, settings: dict[str, Any]) -> Tensor:
    plain = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    trained = settings["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return width * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(settings["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(settings["beta_slow"])), width - 1)
    slow = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / settings["factor"] * slow + plain * (1 - slow)


def _llama3(width: int, base: float, settings: dict[str, Any]) -> Tensor:
    plain = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    trained = settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    fast = ((trained * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return plain / settings["factor"] * (1 - fast) + plain * fast


# -- generation -------------------------------------------------------------------------------


@cache
def _transformers(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def distributions(
    model: Model,
    plan: Expected,
    source: Rows,
    prompt: list[int],
    answer: list[int],
    turn: bool = True,
) -> Tensor:
    """Log-probabilities `[len(answer), vocabulary]` of the answer's tokens: Transformers, in fp32,
    over the source's rows turned in fp64, computes only what is not kept.

    Nothing of the request that was spliced is used but the tokens it gave. turn: False leaves keys
    as they were, to see what it makes.
    """
    ids = prompt + answer[:-1]
    cached = DynamicCache()
    _append(cached, model, source, Kept(0, 0, plan.shared), turn)
    at, logits = plan.shared, torch.empty(0)
    for kept in [*plan.kept, Kept(0, len(ids), 0)]:
        if kept.dst > at:
            fed, where = torch.tensor([ids[at : kept.dst]]), torch.arange(at, kept.dst)[None]
            logits = _transformers(model.folder)(
                input_ids=fed, position_ids=where, past_key_values=cached, use_cache=True
            ).logits[0]
        _append(cached, model, source, kept, turn)
        at = kept.dst + kept.n
    return logits[-len(answer) :].double().log_softmax(-1)


def _append(cached: DynamicCache, model: Model, source: Rows, kept: Kept, turn: bool) -> None:
    if not kept.n:
        return
    rows = slice(kept.src, kept.src + kept.n)
    for layer, (keys, values) in enumerate(zip(source.keys, source.values, strict=True)):
        turned = model.turned(keys[rows], (kept.dst - kept.src) * turn).float()
        if model.latent:
            first, second = turned.split([model.latent, turned.shape[-1] - model.latent], -1)
        else:
            first, second = turned, values[rows].float()
        cached.update(first.transpose(0, 1)[None], second.transpose(0, 1)[None], layer)

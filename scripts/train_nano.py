"""Train `nano`, a DeepSeek-V2 (MLA) language model of four million parameters, on a CPU.

    python scripts/train_nano.py OUT        about an hour; OUT gets what src/leyline/data/nano has

The widths of its cache rows are those of the real models (latent 512, rotary 64, YaRN), so that the
MLA kernels of SGLang and vLLM take it. The text is the Python standard library's; nano_corpus.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from nano_corpus import Message, modules, sessions
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedTokenizerFast

VOCAB = 2048
SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = (
    "{{ '<|begin|>' }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}
"""Of DeepSeek-V2-Lite's published configuration."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of the training: batches of `batch` sequences of `length` tokens."""

    length: int
    batch: int
    tokens: int

    @property
    def steps(self) -> int:
        return self.tokens // (self.length * self.batch)


@dataclass(frozen=True, slots=True)
class Recipe:
    stages: tuple[Stage, ...] = (
        Stage(256, 12, 2_800_000),
        Stage(768, 4, 2_000_000),
        Stage(2048, 2, 200_000),
    )
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    warmup: int = 50
    session_share: float = 0.5
    """Part of the training tokens that comes from sessions."""

    seed: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the tokens, for a try")
    given = parser.parse_args()
    stages = [Stage(s.length, s.batch, int(s.tokens * given.scale)) for s in Recipe().stages]
    recipe = Recipe(stages=tuple(stages))
    began = time.monotonic()
    torch.manual_seed(recipe.seed)
    tokenizer = train_tokenizer(given.scale)
    tokenizer.save_pretrained(given.out)
    print(f"tokenizer after {time.monotonic() - began:.0f} s", flush=True)
    model = DeepseekV2ForCausalLM(configuration())
    log = train(model, tokenizer, recipe)
    log["losses"] = measure(model, tokenizer, max(1, round(8 * given.scale)))
    log["minutes"] = (time.monotonic() - began) / 60
    save(model, given.out, recipe, log)
    print(json.dumps(log["losses"], indent=1))


def configuration() -> DeepseekV2Config:
    """All layers dense: experts would train slowly here and change nothing in the cache. Positions
    as in DeepSeek-V2-Lite: its YaRN reaches so far, though training does not."""
    return DeepseekV2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        norm_topk_prob=False,
        max_position_embeddings=163840,
        rope_theta=10000,
        rope_scaling=dict(YARN),
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.02,
    )


def train_tokenizer(scale: float) -> PreTrainedTokenizerFast:
    """Byte-level BPE; digits stay single, so that numbers can be copied. A try takes part of the
    text, but enough for the whole vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [module.text for module in modules() if not module.held_out]
    text = text[:: max(1, min(8, round(1 / scale)))]
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    fast.chat_template = TEMPLATE
    fast.model_max_length = 163840
    return fast


def files(tokenizer: PreTrainedTokenizerFast, held_out: bool, seed: int) -> Iterator[np.ndarray]:
    """The modules' tokens, in a new random order each time round."""
    texts = [m.text for m in modules() if m.held_out == held_out]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rng = np.random.default_rng(seed)
    while True:
        for i in rng.permutation(len(encoded)):
            yield np.array([tokenizer.bos_token_id, *encoded[i], tokenizer.eos_token_id])


def talks(tokenizer: PreTrainedTokenizerFast, held_out: bool, seed: int) -> Iterator[np.ndarray]:
    """Sessions' tokens."""
    for messages in sessions(held_out, seed):
        yield encode(tokenizer, messages)


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> np.ndarray:
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"])


class Batches:
    """Training batches, each sequence cut from one of two streams of documents."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
        self._streams = [
            files(tokenizer, False, recipe.seed),
            talks(tokenizer, False, recipe.seed),
        ]
        self._rest = [np.zeros(0, np.int64), np.zeros(0, np.int64)]
        self._share = recipe.session_share
        self._rng = np.random.default_rng(recipe.seed)

    def next(self, stage: Stage) -> torch.Tensor:
        """[batch, length + 1]"""
        which = (self._rng.random(stage.batch) < self._share).astype(int)
        return torch.from_numpy(np.stack([self._cut(i, stage.length + 1) for i in which]))

    def _cut(self, which: int, length: int) -> np.ndarray:
        parts, have = [self._rest[which]], len(self._rest[which])
        while have < length:
            parts.append(next(self._streams[which]))
            have += len(parts[-1])
        tokens = np.concatenate(parts)
        self._rest[which] = tokens[length:]
        return tokens[:length].astype(np.int64)


def train(
    model: DeepseekV2ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> dict[str, object]:
    """Warm-up, then a linear way down to a twentieth. Returns what was seen on the way."""
    table = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not table]
    others = [p for p in model.parameters() if p.ndim != 2 or p is table]
    optimizers = (
        Muon(matrices, recipe.muon_rate),
        torch.optim.AdamW(others, recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
    )
    rates = (recipe.muon_rate, recipe.adam_rate)
    plan = [stage for stage in recipe.stages for _ in range(stage.steps)]
    batches = Batches(tokenizer, recipe)
    model.train()
    seen, began, smooth, curve = 0, time.monotonic(), None, []
    for step, stage in enumerate(plan):
        share = schedule(step, len(plan), recipe.warmup)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * share
        loss = loss_of(model, batches.next(stage)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += stage.length * stage.batch
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if step % 50 == 0 or step == len(plan) - 1:
            elapsed = time.monotonic() - began
            curve.append({"step": step, "tokens": seen, "loss": round(smooth, 4)})
            print(
                f"{step}/{len(plan)}  {seen / 1e6:.2f} M tokens  loss {smooth:.3f}  "
                f"{seen / elapsed:.0f} tokens/s  {elapsed / 60:.1f} min",
                flush=True,
            )
    return {"parameters": sum(p.numel() for p in model.parameters()), "curve": curve}


class Muon(torch.optim.Optimizer):
    """Steps of orthogonalized momentum, for matrices (K. Jordan et al., "Muon", 2024). Learns from
    about half the tokens that AdamW takes here. PyTorch's own computes in bf16, which old CPUs do
    in software."""

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        group = self.param_groups[0]
        for matrix in group["params"]:
            mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
            mean.lerp_(matrix.grad, 1 - group["momentum"])
            ahead = matrix.grad.lerp(mean, group["momentum"])
            rows, columns = matrix.shape
            size = group["lr"] * max(1.0, rows / columns) ** 0.5
            matrix.add_(orthogonal(ahead), alpha=-size)


def orthogonal(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """About U V^T of a matrix U S V^T, by Newton-Schulz steps with the quintic's coefficients that
    the Muon paper gives."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if wide is matrix else x.T


def schedule(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 1 - 0.95 * done


def loss_of(model: DeepseekV2ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each token but the first, [batch, length], in nats."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    flat = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    return flat.view(len(tokens), -1)


@torch.no_grad()
def measure(
    model: DeepseekV2ForCausalLM, tokenizer: PreTrainedTokenizerFast, n: int, length: int = 2048
) -> dict[str, float]:
    """Loss on n pieces of held-out text, in nats a token, near a piece's start and far from it."""
    model.eval()
    losses = {}
    for name, stream in (("files", files), ("sessions", talks)):
        tokens = np.zeros(0, np.int64)
        documents = stream(tokenizer, True, 1)
        while len(tokens) < n * (length + 1):
            tokens = np.concatenate([tokens, next(documents)])
        batch = torch.from_numpy(tokens[: n * (length + 1)].reshape(n, length + 1))
        each = torch.cat([loss_of(model, row[None]) for row in batch])
        losses[name] = each.mean().item()
        losses[f"{name}, tokens 1 to 128"] = each[:, :128].mean().item()
        losses[f"{name}, tokens 1024 to {length}"] = each[:, 1024:].mean().item()
    return {name: round(loss, 3) for name, loss in losses.items()}


def save(model: DeepseekV2ForCausalLM, out: Path, recipe: Recipe, log: dict[str, object]) -> None:
    """In bf16, with the keys that published DeepSeek-V2 configurations carry and SGLang and vLLM
    look for. The output layer is written out, as not every engine ties it to the embedding."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.to(torch.bfloat16).save_pretrained(out)
    path = out / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("rope_parameters", None)
    raw.update(
        rope_theta=10000,
        rope_scaling=YARN,
        moe_layer_freq=1,
        ep_size=1,
        seq_aux=True,
        aux_loss_alpha=0.001,
        scoring_func="softmax",
        routed_scaling_factor=1.0,
    )
    path.write_text(json.dumps(raw, indent=2) + "\n")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    training = {"recipe": asdict(recipe), "versions": versions, "threads": torch.get_num_threads()}
    (out / "training.json").write_text(json.dumps({**training, **log}, indent=1) + "\n")


if __name__ == "__main__":
    main()

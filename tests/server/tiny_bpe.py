"""A tokenizer that is trained in a moment, for tests with real servers."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from leyline.tiny import VOCAB

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_bpe(template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens with a chat template; token 2 ends an answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "nrst"]
    tokenizer.train_from_iterator([" ".join(words), "user assistant system tool"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], chat_template=template
    )

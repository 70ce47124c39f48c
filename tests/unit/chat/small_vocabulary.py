"""A byte-level BPE with its own small vocabulary, as a checkpoint other than the official ones has."""

from __future__ import annotations

import json
from typing import Any

from dsv4.chat import ChatTokenizer
from dsv4.chat.protocol import STRUCTURAL_TOKENS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = ["the weather in Paris is sunny and the weather in Rome is rainy", "天气 很好", "a < b </ c\n\n"] * 20


def small_definition(*, special: bool = False) -> dict[str, Any]:
    """tokenizer.json with 400 pieces and the structural tokens behind them, all flagged special or none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken(name, special=special, normalized=False) for name in STRUCTURAL_TOKENS])
    return json.loads(tokenizer.to_str())


def small_tokenizer(*, special: bool = False) -> ChatTokenizer:
    return ChatTokenizer(small_definition(special=special))

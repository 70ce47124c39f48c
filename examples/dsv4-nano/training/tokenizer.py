"""Trains the byte-level BPE vocabulary and writes `tokenizer.json` and `tokenizer_config.json`."""

import json
from itertools import islice
from pathlib import Path

from corpus import BOS, EOS, Corpus
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from vocabulary import CITIES, CODE_WORDS, COLORS, NAMES, PETS

PAD = "<｜▁pad▁｜>"
SPECIAL = [BOS, EOS, PAD]
MARKS = [
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
]
EMOJI = "😊👍🎉🚀😄"


def train_tokenizer(seed: int, vocabulary: int, samples: int = 6000) -> Tokenizer:
    """A tokenizer whose ids 0, 1, 2 are BOS, EOS and padding.

    Emoji are kept out of the merges: each stays several byte tokens, so that streaming has characters to put together.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    marks_and_emoji = {ord(character): " " for character in EMOJI}

    def texts() -> list[str]:
        drawn = [
            sample.text.translate(marks_and_emoji)
            for sample in islice(Corpus(seed, emphasis={"repetition": 0.0}, invented_cities=0.3), samples)
        ]
        for mark in SPECIAL + MARKS:
            drawn = [text.replace(mark, "\n") for text in drawn]
        # Words that the model has to remember or to copy get a token of their own, so they are shown more often here.
        words = [*CODE_WORDS, *NAMES, *COLORS, *PETS, *CITIES]
        return drawn + [f" {word}" for word in words for _ in range(200)]

    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"the corpus gives only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Both files, in the form that transformers and the official checkpoint use."""
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(content: str) -> dict[str, object]:
        fields = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        return {"__type": "AddedToken", "content": content, **fields}

    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": token(BOS),
        "clean_up_tokenization_spaces": False,
        "eos_token": token(EOS),
        "model_max_length": 1048576,
        "pad_token": token(PAD),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

"""A checkpoint directory without weights: the configuration of DeepSeek V4 Flash and a byte-level tokenizer.

Enough for configuration, tokenizer and start-up contract of the PyPTO engine. Token id = byte + 3; 0 begins and 1 ends
a sentence, the control tokens of the chat format follow the bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from dsv4.chat.protocol import STRUCTURAL_TOKENS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
FIRST_BYTE = 3

FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": {"quant_method": "compressed-tensors"},
}


def write_checkpoint(directory: Path) -> Path:
    """Write config.json, the index, and the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(FLASH))
    names = ["embed.weight", "norm.weight", "head.weight"]
    parts = ("attn.wq_b", "attn.wo_b", "ffn.experts.0.w1")
    names += [f"layers.0.{part}.{kind}" for part in parts for kind in ("weight", "scale")]
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "none.safetensors")})
    )
    _write_tokenizer(directory)
    return directory


def _write_tokenizer(directory: Path) -> None:
    specials = [BEGIN, END, PAD]
    vocabulary = {token: index for index, token in enumerate(specials)}
    for value, symbol in enumerate(_byte_symbols()):
        vocabulary[symbol] = FIRST_BYTE + value
    others = [token for token in STRUCTURAL_TOKENS if token not in specials]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*specials, *others)])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def _byte_symbols() -> list[str]:
    """The printable symbol of each byte in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]

"""The shipped nano checkpoint: complete, small, in the official format, with a tokenizer for the chat protocol."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

NANO = Path(__file__).parents[2] / "examples" / "dsv4-nano"
MARKS = re.findall(
    r"\S+",
    "<｜User｜> <｜Assistant｜> <think> </think> ｜DSML｜ <｜latest_reminder｜> <｜action｜> <｜query｜> "
    "<｜authority｜> "
    "<｜domain｜> <｜title｜> <｜read_url｜> <｜extracted_url｜> "
    "<｜fim▁hole｜> <｜fim▁begin｜> <｜fim▁end｜>",
)


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((NANO / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def stored() -> dict[str, tuple[str, list[int]]]:
    """dtype and shape of every tensor, read from the shard that the index names."""
    index = json.loads((NANO / "model.safetensors.index.json").read_text(encoding="utf-8"))
    found: dict[str, tuple[str, list[int]]] = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(NANO / file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                assert index["weight_map"][name] == file
                part = shard.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    assert set(found) == set(index["weight_map"])
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(NANO / "tokenizer.json"))


def expected_tensors(c: dict) -> dict[str, tuple[str, list[int]]]:
    """Every tensor that the official layout demands for this configuration."""
    hidden, width, heads = c["hidden_size"], c["head_dim"], c["num_attention_heads"]
    inner, experts, vocabulary = c["moe_intermediate_size"], c["n_routed_experts"], c["vocab_size"]
    out: dict[str, tuple[str, list[int]]] = {}

    def bf16(name: str, *shape: int) -> None:
        out[name] = ("BF16", list(shape))

    def f32(name: str, *shape: int) -> None:
        out[name] = ("F32", list(shape))

    def fp8(name: str, rows: int, columns: int) -> None:
        out[f"{name}.weight"] = ("F8_E4M3", [rows, columns])
        out[f"{name}.scale"] = ("F8_E8M0", [-(-rows // 128), -(-columns // 128)])

    def fp4(name: str, rows: int, columns: int) -> None:
        out[f"{name}.weight"] = ("I8", [rows, columns // 2])
        out[f"{name}.scale"] = ("F8_E8M0", [rows, columns // 32])

    def head(prefix: str) -> None:
        f32(f"{prefix}hc_head_fn", 4, 4 * hidden)
        f32(f"{prefix}hc_head_base", 4)
        f32(f"{prefix}hc_head_scale", 1)
        bf16(f"{prefix}norm.weight", hidden)

    def compressor(prefix: str, ratio: int, size: int) -> None:
        channels = size * (2 if ratio == 4 else 1)
        bf16(f"{prefix}.wkv.weight", channels, hidden)
        bf16(f"{prefix}.wgate.weight", channels, hidden)
        f32(f"{prefix}.ape", ratio, channels)
        bf16(f"{prefix}.norm.weight", size)

    bf16("embed.weight", vocabulary, hidden)
    bf16("head.weight", vocabulary, hidden)
    head("")
    head("mtp.0.")
    bf16("mtp.0.enorm.weight", hidden)
    bf16("mtp.0.hnorm.weight", hidden)
    fp8("mtp.0.e_proj", hidden, hidden)
    fp8("mtp.0.h_proj", hidden, hidden)
    layers = c["num_hidden_layers"]
    for index, ratio in enumerate(c["compress_ratios"]):
        block = f"layers.{index}" if index < layers else "mtp.0"
        attention, feed = f"{block}.attn", f"{block}.ffn"
        for half in ("attn", "ffn"):
            f32(f"{block}.hc_{half}_fn", 24, 4 * hidden)
            f32(f"{block}.hc_{half}_base", 24)
            f32(f"{block}.hc_{half}_scale", 3)
            bf16(f"{block}.{half}_norm.weight", hidden)
        f32(f"{attention}.attn_sink", heads)
        fp8(f"{attention}.wq_a", c["q_lora_rank"], hidden)
        bf16(f"{attention}.q_norm.weight", c["q_lora_rank"])
        fp8(f"{attention}.wq_b", heads * width, c["q_lora_rank"])
        fp8(f"{attention}.wkv", width, hidden)
        bf16(f"{attention}.kv_norm.weight", width)
        fp8(f"{attention}.wo_a", c["o_groups"] * c["o_lora_rank"], heads * width // c["o_groups"])
        fp8(f"{attention}.wo_b", hidden, c["o_groups"] * c["o_lora_rank"])
        if ratio:
            compressor(f"{attention}.compressor", ratio, width)
        if ratio == 4:
            fp8(f"{attention}.indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
            bf16(f"{attention}.indexer.weights_proj.weight", c["index_n_heads"], hidden)
            compressor(f"{attention}.indexer.compressor", 4, c["index_head_dim"])
        bf16(f"{feed}.gate.weight", experts, hidden)
        if index < c["num_hash_layers"]:
            out[f"{feed}.gate.tid2eid"] = ("I64", [vocabulary, c["num_experts_per_tok"]])
        else:
            f32(f"{feed}.gate.bias", experts)
        for leaf, rows, columns in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)):
            fp8(f"{feed}.shared_experts.{leaf}", rows, columns)
            for expert in range(experts):
                fp4(f"{feed}.experts.{expert}.{leaf}", rows, columns)
    return out


def test_every_tensor_of_the_official_layout_is_there(config: dict, stored: dict) -> None:
    assert stored == expected_tensors(config)


def test_all_kinds_of_layers_are_present(config: dict) -> None:
    hidden_layers = config["compress_ratios"][:-1]
    assert set(hidden_layers) == {0, 4, 128}
    assert len(hidden_layers) == config["num_hidden_layers"]
    assert config["compress_ratios"][-1] == 0
    assert 1 <= config["num_hash_layers"] < config["num_hidden_layers"]
    assert config["n_routed_experts"] >= 16
    assert config["n_routed_experts"] % 8 == 0
    assert config["num_nextn_predict_layers"] == 1


def test_it_is_small_and_sharded() -> None:
    files = [path for path in NANO.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert len(list(NANO.glob("model-*.safetensors"))) > 1


def test_quantization_settings_are_the_official_ones(config: dict) -> None:
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    assert config["expert_dtype"] == "fp4"
    assert config["dsv4_reasoning_effort_profile"] == "preview"


def test_special_tokens(tokenizer: Tokenizer, config: dict) -> None:
    specials = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    assert [tokenizer.token_to_id(token) for token in specials] == [0, 1, 2]
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == dict.fromkeys(specials, True) | dict.fromkeys(MARKS, False)
    for mark in MARKS:
        assert tokenizer.encode(f"a{mark}b", add_special_tokens=False).tokens[1] == mark
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    settings = json.loads((NANO / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["add_bos_token"] is False
    assert "chat_template" not in settings


@pytest.mark.parametrize(
    "text",
    [
        "What is 1+1?",
        "  two\n\nlines\t",
        "你好，世界",
        "😊 👍🏽 𝔘nicode",
        "naïve café",
        "\x00\x7f",
        "<|user|>",
        "0.5e-3",
        "",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_text_reads_the_same_with_and_without_the_added_vocabulary(tokenizer: Tokenizer) -> None:
    plain = json.loads((NANO / "tokenizer.json").read_text(encoding="utf-8"))
    plain["added_tokens"] = []
    bare = Tokenizer.from_str(json.dumps(plain))
    text = 'Answer the user: 12 + 30 = 42, {"a": [1, 2]} 你好 😊\n\nuser < > | think'
    assert bare.encode(text, add_special_tokens=False).ids == tokenizer.encode(text, add_special_tokens=False).ids
    look_alike = tokenizer.token_to_id("</think>")
    assert look_alike not in bare.encode("a</think>b", add_special_tokens=False).ids


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("8225", add_special_tokens=False).tokens == ["8", "2", "2", "5"]

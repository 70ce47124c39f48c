"""What is wrong with a source is found before a byte is written, or while converting, and named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dsv4.errors import Dsv4Error
from dsv4_converter import convert

from tests.unit.converter.checkpoints import Tensor, make_source, read_shard, variant, write_json, write_shard

LAYOUT = variant(ratios=(0, 4), experts=8)
FIRST, SECOND, THIRD = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("pristine") / "source", LAYOUT)


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "source"))


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    replacement = change(content)
    write_json(path, content if replacement is None else replacement)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda source: edit_json(source / "config.json", lambda content: content.update(changes))


def without_config(name: str) -> Callable[[Path], None]:
    return lambda source: edit_json(source / "config.json", lambda content: content.pop(name) and None)


def index_entry(name: str, shard: Any) -> Callable[[Path], None]:
    return lambda source: edit_json(source / INDEX, lambda content: content["weight_map"].update({name: shard}))


def bytes_of(path: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda source: (source / path).write_bytes(change((source / path).read_bytes())) and None


def shard_of(source: Path, tensor: str) -> Path:
    shard: str = json.loads((source / INDEX).read_text())["weight_map"][tensor]
    return source / shard


def tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Replace a stored tensor; None removes it from shard and index."""

    def apply(source: Path) -> None:
        path = shard_of(source, name)
        tensors = read_shard(path)
        changed = change(tensors[name])
        if changed is None:
            del tensors[name]
            edit_json(source / INDEX, lambda content: content["weight_map"].pop(name) and None)
        else:
            tensors[name] = changed
        write_shard(path, tensors)

    return apply


def added(name: str, value: Tensor) -> Callable[[Path], None]:
    def apply(source: Path) -> None:
        write_shard(source / FIRST, read_shard(source / FIRST) | {name: value})
        index_entry(name, FIRST)(source)

    return apply


def dtype(name: str) -> Callable[[Tensor], Tensor]:
    return lambda value: (name, value[1], value[2])


def shape(*extents: int) -> Callable[[Tensor], Tensor]:
    return lambda value: (value[0], extents, value[2])


def byte(row: int, column: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(old: Tensor) -> Tensor:
        array = np.frombuffer(bytearray(old[2]), np.uint8).reshape(old[1]).copy()
        array[row, column] = value
        return old[0], old[1], array.tobytes()

    return change


def remove(_: Tensor) -> None:
    return None


def header(change: Callable[[str], str]) -> Callable[[Path], None]:
    def apply(source: Path) -> None:
        raw = (source / FIRST).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        text = change(raw[8 : 8 + length].decode()).encode()
        (source / FIRST).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return apply


def outside(source: Path) -> None:
    shutil.copy(source / FIRST, source.parent / "outside.safetensors")


def traversal(name: str) -> Callable[[Path], None]:
    def apply(source: Path) -> None:
        outside(source)
        edit_json(source / INDEX, lambda content: {"weight_map": dict.fromkeys(content["weight_map"], name)})

    return apply


def duplicate_index_key(source: Path) -> None:
    text = (source / INDEX).read_text()
    (source / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"embed.weight": "{THIRD}",', 1))


def fifo(source: Path) -> None:
    (source / FIRST).unlink()
    os.mkfifo(source / FIRST)


def dangling(source: Path) -> None:
    (source / FIRST).unlink()
    (source / FIRST).symlink_to("nowhere.safetensors")


def subdirectory(source: Path) -> None:
    (source / "sub").mkdir()
    (source / FIRST).rename(source / "sub" / FIRST)
    edit_json(
        source / INDEX,
        lambda content: {
            "weight_map": {k: f"sub/{FIRST}" if v == FIRST else v for k, v in content["weight_map"].items()}
        },
    )


def many_mtp_blocks(source: Path) -> None:
    """The tensors have one MTP block, the configuration speaks of three."""
    config(num_nextn_predict_layers=3, compress_ratios=[0, 4, 0, 0, 0])(source)


EXPERT = "layers.0.ffn.experts.0.w1"
WQ_A = "layers.0.attn.wq_a"
WQ_B = "layers.0.attn.wq_b"
SINK = "layers.0.attn.attn_sink"

# fault -> (how to make it, what the message must name)
FAULTS_SEEN_IN_HEADERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated payload": (bytes_of(FIRST, lambda raw: raw[:-1000]), FIRST),
    "truncated header": (bytes_of(FIRST, lambda raw: raw[:100]), FIRST),
    "empty shard": (bytes_of(FIRST, lambda _: b""), FIRST),
    "trailing byte": (bytes_of(FIRST, lambda raw: raw + b"x"), FIRST),
    "missing shard": (lambda source: (source / FIRST).unlink(), FIRST),
    "tensor not in the index": (
        lambda source: edit_json(source / INDEX, lambda content: content["weight_map"].pop(SINK) and None),
        SINK,
    ),
    "tensor not in the shard": (index_entry("layers.9.x", FIRST), "layers.9.x"),
    "path traversal": (traversal("../outside.safetensors"), "unsafe shard name"),
    "absolute path": (traversal("/outside.safetensors"), "unsafe shard name"),
    "sub-directory": (subdirectory, "unsafe shard name"),
    "dot as shard name": (index_entry(SINK, "."), "unsafe shard name"),
    "number as shard name": (index_entry(SINK, 3), SINK),
    "expert of another integer type": (tensor(f"{EXPERT}.weight", dtype("U8")), f"{EXPERT}.weight"),
    "expert labelled FP8": (tensor(f"{EXPERT}.weight", dtype("F8_E4M3")), f"{EXPERT}.weight"),
    "FP8 weight of the other kind": (tensor(f"{WQ_B}.weight", dtype("F8_E5M2")), f"{WQ_B}.weight"),
    "scale as integers": (tensor(f"{WQ_B}.scale", dtype("U8")), f"{WQ_B}.scale"),
    "transposed scale": (tensor(f"{WQ_B}.scale", shape(1, 2)), f"{WQ_B}.scale"),
    "rank 3": (tensor(f"{WQ_B}.weight", shape(256, 96, 1)), f"{WQ_B}.weight"),
    "INT8 weight without scale": (tensor(f"{WQ_B}.scale", remove), f"{WQ_B}.scale"),
    "BF16 weight without scale": (tensor(f"{WQ_A}.scale", remove), f"{WQ_A}.scale"),
    "scale without weight": (tensor(f"{WQ_A}.weight", remove), f"{WQ_A}.weight"),
    "orphan scale": (added("layers.0.other.scale", ("F32", (1,), b"\0" * 4)), "layers.0.other.scale"),
    "scale of a plain weight": (added("norm.scale", ("F32", (1,), b"\0" * 4)), "norm.scale"),
    "expert missing": (
        lambda source: [tensor(f"{EXPERT}.{part}", remove)(source) for part in ("weight", "scale")],
        EXPERT,
    ),
    "plain tensor missing": (tensor(SINK, remove), SINK),
    "plain tensor of another type": (tensor("norm.weight", lambda t: ("I64", (40,), t[2])), "norm.weight"),
    "plain tensor of another shape": (tensor(SINK, lambda t: (t[0], (2, 4), t[2])), SINK),
    "duplicate header name": (header(lambda text: text.replace(WQ_B, WQ_A)), f"{WQ_A}.weight"),
    "duplicate index name": (duplicate_index_key, "embed.weight"),
    "overlap": (header(lambda text: text.replace('"data_offsets":[0,', '"data_offsets":[16,', 1)), FIRST),
    "header of 2^40 bytes": (bytes_of(FIRST, lambda raw: (1 << 40).to_bytes(8, "little") + raw[8:]), FIRST),
    "header above the format's limit": (
        bytes_of(FIRST, lambda _: (120_000_000).to_bytes(8, "little") + b" " * 120_000_000),
        FIRST,
    ),
    "no compress_ratios": (without_config("compress_ratios"), "compress_ratios"),
    "too few compress_ratios": (config(compress_ratios=[0]), "compress_ratios"),
    "compress_ratios of strings": (config(compress_ratios=["0", "4", "0"]), "compress_ratios"),
    "unknown compress ratio": (config(compress_ratios=[0, 7, 0]), "7"),
    "compress ratios disagree with tensors": (config(compress_ratios=[0, 0, 0]), "layers.1.attn"),
    "MTP ratio not zero": (config(compress_ratios=[0, 4, 4]), "compress_ratios"),
    "more layers than tensors": (config(num_hidden_layers=3, compress_ratios=[0, 4, 0, 0]), "layers.2."),
    "more experts than tensors": (config(n_routed_experts=9), "layers.0.ffn"),
    "expert count of letters": (config(n_routed_experts="abc"), "n_routed_experts"),
    "boolean expert count": (config(n_routed_experts=True), "n_routed_experts"),
    "layers null": (config(num_hidden_layers=None), "num_hidden_layers"),
    "unknown expert dtype": (config(expert_dtype="int3"), "expert_dtype"),
    "more MTP blocks than tensors": (many_mtp_blocks, "mtp.1."),
    "quantization_config a list": (config(quantization_config=[]), "quantization_config"),
    "another block size": (
        config(quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}),
        "weight_block_size",
    ),
    "config a list": (lambda source: write_json(source / "config.json", []), "config.json"),
    "config truncated": (bytes_of("config.json", lambda raw: raw[:50]), "config.json"),
    "config not UTF-8": (bytes_of("config.json", lambda raw: b"\xff\xfe" + raw), "config.json"),
    "config a number of nested lists": (bytes_of("config.json", lambda _: b"[" * 200_000), "config.json"),
    "index a list": (lambda source: write_json(source / INDEX, []), INDEX),
    "index missing": (lambda source: (source / INDEX).unlink(), INDEX),
    "index empty": (lambda source: write_json(source / INDEX, {"weight_map": {}}), INDEX),
    "another model": (config(model_type="llama"), "llama"),
    "another architecture": (config(architectures=["LlamaForCausalLM"]), "architectures"),
    "already converted": (config(quantization_config={"quant_method": "compressed-tensors"}), "already converted"),
    "source missing": (lambda source: shutil.rmtree(source), "no such directory"),
    "dangling link": (dangling, FIRST),
    "FIFO as shard": (fifo, FIRST),
}


@pytest.mark.parametrize("fault", FAULTS_SEEN_IN_HEADERS)
def test_fault_is_named_and_nothing_is_written(source: Path, tmp_path: Path, fault: str) -> None:
    make, named = FAULTS_SEEN_IN_HEADERS[fault]
    make(source)
    with pytest.raises(Dsv4Error) as raised:
        convert(source, tmp_path / "out")
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def bf16_nan(value: Tensor) -> Tensor:
    return value[0], value[1], value[2][:10] + b"\xc0\x7f" + value[2][12:]


def infinite_float(value: Tensor) -> Tensor:
    return value[0], value[1], value[2][:4] + b"\0\0\x80\x7f" + value[2][8:]


def loud_group(value: Tensor) -> Tensor:
    return byte(5, 3, 0x77)(value)


FAULTS_SEEN_IN_VALUES: dict[str, tuple[Callable[[Path], Any], str, int]] = {
    "MXFP4 scale NaN": (tensor(f"{EXPERT}.scale", byte(7, 2, 0xFF)), f"{EXPERT}.weight", 7),
    "MXFP4 overflow": (
        lambda source: [
            tensor(f"{EXPERT}.weight", loud_group)(source),
            tensor(f"{EXPERT}.scale", byte(5, 0, 0xFE))(source),
        ],
        f"{EXPERT}.weight",
        5,
    ),
    "FP8 weight NaN": (tensor(f"{WQ_B}.weight", byte(131, 95, 0x7F)), f"{WQ_B}.weight", 131),
    "FP8 scale NaN": (tensor(f"{WQ_B}.scale", byte(1, 0, 0xFF)), f"{WQ_B}.scale", 1),
    "FP8 to BF16 weight NaN": (tensor(f"{WQ_A}.weight", byte(90, 3, 0xFF)), f"{WQ_A}.weight", 90),
    "norm NaN": (tensor("layers.1.attn_norm.weight", bf16_nan), "layers.1.attn_norm.weight", 5),
    "float32 infinity": (tensor(SINK, infinite_float), SINK, 1),
    "expert number out of range": (
        tensor("layers.0.ffn.gate.tid2eid", lambda t: (t[0], t[1], t[2][:104] + b"\x08" + t[2][105:])),
        "layers.0.ffn.gate.tid2eid",
        2,
    ),
}


@pytest.mark.parametrize("rounding", ["exact", "rtn"])
@pytest.mark.parametrize("fault", FAULTS_SEEN_IN_VALUES)
def test_bad_values_name_tensor_and_row(source: Path, tmp_path: Path, fault: str, rounding: Any) -> None:
    make, name, row = FAULTS_SEEN_IN_VALUES[fault]
    make(source)
    with pytest.raises(Dsv4Error, match=rf"tensor {name}: row {row}: "):
        convert(source, tmp_path / "out", rounding=rounding)
    marker = json.loads((tmp_path / "out" / ".pypto-w8a8-conversion.json").read_text())
    assert marker["complete"] is False
    assert not (tmp_path / "out" / "config.json").exists()
    assert not list((tmp_path / "out").glob(".*.tmp"))
    assert not list((tmp_path / "out").glob("*.lock"))


def test_negative_float_scale_is_refused(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", variant(ratios=(0,), expert_dtype="fp8", float_scales=True))
    tensor(f"{WQ_B}.scale", lambda t: (t[0], t[1], np.float32(-1).tobytes() + t[2][4:]))(source)
    with pytest.raises(Dsv4Error, match=rf"{WQ_B}.scale: row 0"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("rounding", ["exact", "rtn"])
def test_tiny_weights_keep_their_precision_unless_the_rule_is_asked_for(
    source: Path, tmp_path: Path, rounding: Any
) -> None:
    """The floor of the round-to-nearest rule would erase this expert; the exact rounding has none."""
    tensor(f"{EXPERT}.scale", lambda t: (t[0], t[1], bytes([127 - 24]) * len(t[2])))(source)
    convert(source, tmp_path / "out", rounding=rounding)
    tensors = read_shard(shard_of(tmp_path / "out", f"{EXPERT}.weight"))
    codes = np.frombuffer(tensors[f"{EXPERT}.weight"][2], np.int8)
    assert (np.abs(codes).max() > 60) == (rounding == "exact")


def test_redundant_mtp_copies_are_kept(source: Path, tmp_path: Path) -> None:
    embedding = read_shard(shard_of(source, "embed.weight"))["embed.weight"]
    added("mtp.0.emb.tok_emb.weight", embedding)(source)
    convert(source, tmp_path / "out")
    assert read_shard(tmp_path / "out" / FIRST)["mtp.0.emb.tok_emb.weight"] == embedding

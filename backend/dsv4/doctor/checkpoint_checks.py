"""Is the checkpoint one that can be served, complete, and fast enough to read?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4.checkpoint.names import expected_tensors
from dsv4.checkpoint.safetensors_file import SafetensorsFile
from dsv4.config import ModelConfig
from dsv4.default_model import AUTOMATIC_CONVERSION_LIMIT_BYTES
from dsv4.doctor.findings import Finding, error, gibibytes, ok, warning
from dsv4.doctor.machine import Machine
from dsv4.errors import CheckpointError, ConfigurationError

INDEX_NAME = "model.safetensors.index.json"
CONVERSION_MARKER = ".pypto-w8a8-conversion.json"
SLOW_LOAD_SECONDS = 15 * 60
SPEED_SAMPLE_BYTES = 256 << 20
NAMES_SHOWN = 3

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)


def check_checkpoint(machine: Machine, directory: Path, *, npu: bool) -> Iterator[Finding]:
    """Format, completeness, tokenizer, memory and disk of one checkpoint directory."""
    document = _json_object(directory / "config.json")
    if isinstance(document, Finding):
        yield document
        return
    foreign = foreign_format(directory, document)
    if foreign is not None:
        yield foreign
        return
    try:
        config = ModelConfig.from_dict(document, label=str(directory / "config.json"))
    except ConfigurationError as failure:
        yield error("checkpoint.config", str(failure), "take config.json from the published checkpoint again")
        return
    yield from check_form(directory, config, npu=npu)
    yield from check_tensors(directory, config)
    yield from check_tokenizer(directory, config)
    yield from check_memory(machine, directory)
    yield from check_disk(machine, directory)


def foreign_format(directory: Path, document: dict[str, Any]) -> Finding | None:
    """Weights that belong to another engine, named; None when they may be ours."""
    convert = "download the published FP8/MXFP4 checkpoint and run: dsv4 convert --input-dir ... --output-dir ..."
    if document.get("model_type") != "deepseek_v4":
        kind = document.get("model_type")
        return error("checkpoint.model", f"model_type is {kind!r}, served is 'deepseek_v4'", "name another directory")
    if (directory / "quant_model_description.json").exists():
        return error("checkpoint.format", "these are ModelSlim weights, made for vllm-ascend", convert)
    if any(directory.glob("*.gguf")):
        return error("checkpoint.format", "these are GGUF weights, made for llama.cpp", convert)
    method = (document.get("quantization_config") or {}).get("quant_method")
    if method not in ("fp8", "compressed-tensors"):
        return error("checkpoint.format", f"quantization_config.quant_method is {method!r}", convert)
    return None


def check_form(directory: Path, config: ModelConfig, *, npu: bool) -> Iterator[Finding]:
    """Converted, and completely so."""
    if config.checkpoint_format == "source":
        if not npu and shards_size(directory) <= AUTOMATIC_CONVERSION_LIMIT_BYTES:
            yield ok("checkpoint.format", "source checkpoint, small enough to be converted on first use")
        else:
            yield error(
                "checkpoint.format",
                f"source checkpoint (FP8/MXFP4, {gibibytes(shards_size(directory))}): not yet converted to W8A8",
                f"dsv4 convert --input-dir {directory} --output-dir {directory}-w8a8",
            )
        return
    marker = directory / CONVERSION_MARKER
    if marker.exists():
        state = _json_object(marker)
        if isinstance(state, Finding) or state.get("complete") is False:
            yield error(
                "checkpoint.conversion",
                f"{marker.name} says that the conversion did not finish",
                f"dsv4 convert --resume --input-dir SOURCE --output-dir {directory}",
            )
            return
    yield ok("checkpoint.format", f"W8A8 checkpoint, {gibibytes(shards_size(directory))}")


def check_tensors(directory: Path, config: ModelConfig) -> Iterator[Finding]:
    """Every shard opens, and every tensor that the network needs is in one of them with the right shape."""
    kind = config.checkpoint_format or "w8a8"
    remedy = "copy or convert the checkpoint again, then: dsv4 verify " + str(directory)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        for path in shard_paths(directory):
            with SafetensorsFile(path) as file:
                found.update({name: (entry.dtype, entry.shape) for name, entry in file.entries.items()})
    except CheckpointError as failure:
        yield error("checkpoint.shards", str(failure), remedy)
        return
    wrong = []
    for name, expected in expected_tensors(config, kind).items():
        stored = found.get(name)
        if stored is None:
            wrong.append(f"{name} is missing")
        elif stored[1] != tuple(expected.shape) or stored[0] not in expected.dtypes:
            wrong.append(f"{name} is {stored[0]} {list(stored[1])}")
    if wrong:
        shown = "; ".join(wrong[:NAMES_SHOWN]) + (f"; and {len(wrong) - NAMES_SHOWN} more" * (len(wrong) > NAMES_SHOWN))
        yield error("checkpoint.tensors", shown, remedy)
    else:
        yield ok("checkpoint.tensors", f"{len(found)} tensors, all that the network needs")


def check_tokenizer(directory: Path, config: ModelConfig) -> Iterator[Finding]:
    """The tokenizer opens, stays inside the vocabulary and has the tokens of the chat format."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    remedy = "copy tokenizer.json and tokenizer_config.json from the published checkpoint"
    if not path.exists():
        yield error("checkpoint.tokenizer", f"{path} is missing", remedy)
        return
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as failure:  # noqa: BLE001  # the library raises plain Exception for every defect of the file
        yield error("checkpoint.tokenizer", f"{path}: {failure}", remedy)
        return
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    missing = [token for token in SPECIAL_TOKENS if tokenizer.token_to_id(token) is None]
    if size > config.vocab_size:
        yield error(
            "checkpoint.tokenizer", f"{size} tokens, but config.json has vocab_size {config.vocab_size}", remedy
        )
    elif missing:
        yield error("checkpoint.tokenizer", f"lacks {', '.join(missing)}, which the chat format needs", remedy)
    else:
        yield ok("checkpoint.tokenizer", f"{size} tokens with those of the chat format")


def check_memory(machine: Machine, directory: Path) -> Iterator[Finding]:
    """Main memory holds the weights once, as every engine does while it loads."""
    size = shards_size(directory)
    total, available = machine.memory()
    if available < size:
        yield error(
            "memory.weights",
            f"{gibibytes(available)} of {gibibytes(total)} are available; the weights take {gibibytes(size)} while "
            "they are loaded",
            "stop other programs or raise the container's memory limit",
        )
    else:
        yield ok("memory.weights", f"{gibibytes(available)} available for {gibibytes(size)} of weights")


def check_disk(machine: Machine, directory: Path) -> Iterator[Finding]:
    """Reading the shards takes minutes, not hours."""
    size = shards_size(directory)
    if size < AUTOMATIC_CONVERSION_LIMIT_BYTES:
        return
    paths = [path for path in shard_paths(directory) if path.is_file()]
    speed = machine.read_speed(max(paths, key=lambda path: path.stat().st_size), SPEED_SAMPLE_BYTES)
    if speed is None:
        return
    seconds = size / speed
    text = f"{speed / 1e9:.2f} GB/s: {gibibytes(size)} take {seconds / 60:.1f} minutes"
    if seconds > SLOW_LOAD_SECONDS:
        yield warning("disk.speed", text, "put the checkpoint on local NVMe, or keep it in the page cache")
    else:
        yield ok("disk.speed", text)


def shard_paths(directory: Path) -> list[Path]:
    """The shards that the index names, else every safetensors file that is not a sidecar.

    Raises CheckpointError when the index cannot be used.
    """
    if not (directory / INDEX_NAME).exists():
        return sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("pypto-"))
    return [directory / name for name in sorted(set(read_weight_map(directory).values()))]


def read_weight_map(directory: Path) -> dict[str, str]:
    """Tensor name to shard, from the index. Raises CheckpointError when it is missing or cannot be used."""
    index = directory / INDEX_NAME
    document = _json_object(index)
    if isinstance(document, Finding):
        raise CheckpointError(document.text)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    outside = [name for name in weight_map.values() if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index}: {min(outside)!r} is not a file name in this directory")
    return weight_map


def shards_size(directory: Path) -> int:
    """Bytes of all shards; 0 for those that are missing or when the index is unreadable."""
    try:
        return sum(path.stat().st_size for path in shard_paths(directory) if path.is_file())
    except CheckpointError:
        return 0


def _json_object(path: Path) -> dict[str, Any] | Finding:
    """The JSON object in a file, or the finding that says why there is none."""
    remedy = "name the directory of a checkpoint with --model; it has config.json and safetensors shards"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return error("checkpoint.files", f"{path} is missing", remedy)
    except (OSError, ValueError) as failure:
        return error("checkpoint.files", f"{path} cannot be read: {failure}", remedy)
    if not isinstance(document, dict):
        return error("checkpoint.files", f"{path} is not a JSON object", remedy)
    return document

"""Faults of a checkpoint, put into a real small one."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from dsv4.checkpoint.names import expected_tensors
from dsv4.checkpoint.safetensors_file import DTYPE_BYTES
from dsv4.checkpoint.sidecar import (
    SIDECAR_FORMAT,
    SIDECAR_RULES,
    content_fingerprint,
    sidecar_path,
    source_fingerprint,
    stacked_shape,
)
from dsv4.config import ModelConfig
from dsv4.doctor.checkpoint_checks import SPECIAL_TOKENS, check_checkpoint, read_weight_map
from dsv4.doctor.findings import Finding, Severity
from dsv4.doctor.sidecar_checks import check_sidecar
from tokenizers import AddedToken, Tokenizer, models

from tests.unit.doctor.fake_machine import FakeMachine

SHARD = "model-00001-of-00001.safetensors"
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "compress_ratios": [0, 4, 128, 0],
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "quantization_config": {"quant_method": "compressed-tensors"},
}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> None:
    """A valid file whose payload is zeros."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = DTYPE_BYTES[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(offset))


@pytest.fixture(scope="module")
def sound_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    expected = expected_tensors(ModelConfig.from_dict(CONFIG), "w8a8")
    tensors = {name: (tensor.dtypes[0], tuple(tensor.shape)) for name, tensor in expected.items()}
    write_safetensors(directory / SHARD, tensors, {})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SHARD)}))
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def checkpoint(sound_checkpoint: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound_checkpoint, tmp_path / "model")
    return tmp_path / "model"


def problems(directory: Path, machine: FakeMachine | None = None, *, npu: bool = True) -> list[Finding]:
    findings = check_checkpoint(machine or FakeMachine(), directory, npu=npu)
    return [finding for finding in findings if finding.severity is not Severity.OK]


def change_config(directory: Path, **changes: object) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def test_a_sound_checkpoint_has_no_problem(checkpoint: Path) -> None:
    assert problems(checkpoint) == []


def test_foreign_weights_are_named(checkpoint: Path) -> None:
    (checkpoint / "quant_model_description.json").write_text("{}")
    (finding,) = problems(checkpoint)
    assert (finding.check, "ModelSlim" in finding.text, "dsv4 convert" in finding.remedy) == (
        "checkpoint.format",
        True,
        True,
    )


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        ({"model_type": "llama"}, "checkpoint.model", "'llama'"),
        ({"quantization_config": {"quant_method": "awq"}}, "checkpoint.format", "'awq'"),
        ({"quantization_config": None}, "checkpoint.format", "None"),
        ({"compress_ratios": [0, 7, 128, 0]}, "checkpoint.config", "compress_ratios"),
        ({"quantization_config": {"quant_method": "fp8"}}, "checkpoint.format", "not yet converted"),
    ],
)
def test_wrong_configurations(checkpoint: Path, changes: dict[str, object], check: str, text: str) -> None:
    change_config(checkpoint, **changes)
    found = problems(checkpoint)
    assert found[0].check == check
    assert text in found[0].text


def test_a_small_source_checkpoint_is_fine_without_npus(checkpoint: Path) -> None:
    change_config(checkpoint, quantization_config={"quant_method": "fp8"})
    assert "checkpoint.format" not in [finding.check for finding in problems(checkpoint, npu=False)]


def test_missing_and_broken_files(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert [finding.check for finding in problems(checkpoint)] == ["checkpoint.tokenizer"]
    (checkpoint / "tokenizer.json").write_text("{")
    assert [finding.check for finding in problems(checkpoint)] == ["checkpoint.tokenizer"]
    (checkpoint / "config.json").write_text("[]")
    assert "not a JSON object" in problems(checkpoint)[0].text
    (checkpoint / "config.json").unlink()
    assert "is missing" in problems(checkpoint)[0].text


def test_a_truncated_shard_is_named(checkpoint: Path) -> None:
    os.truncate(checkpoint / SHARD, (checkpoint / SHARD).stat().st_size - 1)
    (finding,) = problems(checkpoint)
    assert finding.check == "checkpoint.shards"
    assert SHARD in finding.text


def test_an_index_that_leaves_the_directory_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    (finding,) = [finding for finding in problems(checkpoint) if finding.check == "checkpoint.shards"]
    assert "not a file name in this directory" in finding.text


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    change_config(checkpoint, num_hidden_layers=4, compress_ratios=[0, 4, 128, 4, 0])
    (finding,) = problems(checkpoint)
    assert finding.check == "checkpoint.tensors"
    assert "layers.3." in finding.text
    assert "more" in finding.text


def test_an_unfinished_conversion_is_said(checkpoint: Path) -> None:
    (checkpoint / ".pypto-w8a8-conversion.json").write_text(json.dumps({"complete": False}))
    (finding,) = problems(checkpoint)
    assert (finding.check, "--resume" in finding.remedy) == ("checkpoint.conversion", True)


def test_a_tokenizer_larger_than_the_vocabulary_is_said(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.add_tokens([f"token{i}" for i in range(CONFIG["vocab_size"])])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    (finding,) = problems(checkpoint)
    assert "vocab_size 64" in finding.text


def test_too_little_memory_is_said(checkpoint: Path) -> None:
    (finding,) = problems(checkpoint, FakeMachine(memory_bytes=(1 << 20, 1000)))
    assert finding.check == "memory.weights"


def test_a_slow_disk_is_said_for_a_huge_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4.doctor.checkpoint_checks.shards_size", lambda directory: 274 << 30)
    machine = FakeMachine(bytes_per_second=1e8)
    (finding,) = problems(checkpoint, machine)
    assert (finding.check, finding.severity) == ("disk.speed", Severity.WARNING)
    assert "49.0 minutes" in finding.text
    machine.bytes_per_second = 3e9
    assert problems(checkpoint, machine) == []


def write_sidecar(
    directory: Path, *, layout: str = SIDECAR_FORMAT, with_content: bool = True, columns: int | None = None
) -> None:
    """A whole sidecar of zeros for 8 ranks; `columns` gives one tensor another shape."""
    config, weight_map = ModelConfig.from_directory(directory), read_weight_map(directory)
    metadata = {"format": layout, "source_fingerprint": source_fingerprint(directory, config, weight_map, 8)}
    if with_content:
        metadata["content_fingerprint"] = content_fingerprint(directory, config, weight_map, 8)
    tensors = {rule.name: (rule.dtype, stacked_shape(config, rule, 8)) for rule in SIDECAR_RULES}
    if columns is not None:
        tensors["wq_a"] = ("BF16", (8, columns))
    write_safetensors(sidecar_path(directory, 8), tensors, metadata)


def sidecar_check(directory: Path, machine: FakeMachine | None = None) -> str:
    (finding,) = check_sidecar(machine or FakeMachine(), directory, 8)
    return finding.check


def test_sidecar_states(checkpoint: Path) -> None:
    assert sidecar_check(checkpoint) == "sidecar.present"
    write_sidecar(checkpoint)
    assert sidecar_check(checkpoint) == "sidecar.hot"
    assert sidecar_check(checkpoint, FakeMachine(residency=0.94)) == "sidecar.cold"
    assert sidecar_check(checkpoint, FakeMachine(residency=None)) == "sidecar.cold"
    assert sidecar_check(checkpoint, FakeMachine(residency=0.0, memory_bytes=(10, 10))) == "sidecar.too_large"
    write_sidecar(checkpoint, columns=2)
    assert sidecar_check(checkpoint) == "sidecar.corrupt"
    write_sidecar(checkpoint, layout="other")
    assert sidecar_check(checkpoint) == "sidecar.format"
    os.truncate(sidecar_path(checkpoint, 8), 4)
    assert sidecar_check(checkpoint) == "sidecar.readable"


def test_shards_that_only_changed_their_times_are_told_from_others(checkpoint: Path) -> None:
    write_sidecar(checkpoint, with_content=False)
    os.utime(checkpoint / SHARD, ns=(1, 1))
    assert sidecar_check(checkpoint) == "sidecar.stale"
    write_sidecar(checkpoint)
    os.utime(checkpoint / SHARD, ns=(2, 2))
    assert sidecar_check(checkpoint) == "sidecar.times"


def test_changed_shards_are_noticed_though_size_and_time_were_kept(checkpoint: Path) -> None:
    write_sidecar(checkpoint)
    shard = checkpoint / SHARD
    status = shard.stat()
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert sidecar_check(checkpoint) == "sidecar.stale"

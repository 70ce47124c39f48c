"""The sidecar: payload, resumption, faults, and the decisions at start-up."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4.checkpoint import sidecar
from dsv4.checkpoint.safetensors_file import SafetensorsFile
from dsv4.errors import CheckpointError, ConfigurationError, Dsv4Error
from dsv4_converter import ConversionCancelledError, convert, output_files, prepack, verify
from dsv4_converter.dimensions import Dimensions
from safetensors.torch import load_file, save_file

from tests.unit.converter.checkpoints import make_source, variant
from tests.unit.converter.test_source_faults import edit_json

RANKS = 4
NAME = f"pypto-deepseek-v4-stacked-r{RANKS}.safetensors"
LAYOUT = variant(ratios=(0, 4, 128, 4), experts=8, hash_layers=2)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    convert(make_source(root / "source", LAYOUT), root / "served")
    return root / "served"


@pytest.fixture
def served(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "served"))


def description(directory: Path) -> tuple[Dimensions, dict[str, str]]:
    config = Dimensions.from_config(json.loads((directory / "config.json").read_text()))
    return config, json.loads((directory / INDEX).read_text())["weight_map"]


def decide(directory: Path, **options: Any) -> sidecar.SidecarDecision:
    config, weight_map = description(directory)
    return sidecar.open_sidecar(directory, config, weight_map, ranks=RANKS, **options)


def expected_payload(directory: Path) -> dict[str, torch.Tensor]:
    """The stacked tensors by plain torch operations."""
    config, weight_map = description(directory)
    tensors: dict[str, torch.Tensor] = {}
    for shard in set(weight_map.values()):
        tensors.update(load_file(directory / shard))
    per_rank = config.n_routed_experts // RANKS
    hadamard = torch.ones(1, 1)
    while len(hadamard) < config.index_head_dim:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    hadamard = (hadamard * config.index_head_dim**-0.5).bfloat16()
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8, "I32": torch.int32}
    result = {}
    for rule in sidecar.SIDECAR_RULES:
        parts = []
        for rank in range(RANKS):
            layers = []
            for layer in sidecar.group_layers(config, rule.group):
                name = f"layers.{layer}.{rule.source}"
                if rule.per_expert:
                    names = [name.format(expert=rank * per_rank + index) for index in range(per_rank)]
                    value = torch.stack([tensors[expert] for expert in names])
                elif not rule.source:
                    value = hadamard
                elif name not in tensors:
                    value = torch.zeros(sidecar.layer_shape(config, rule, RANKS))
                else:
                    value = tensors[name].T if rule.transpose else tensors[name]
                if rule.name == "wo_a":
                    value = value.reshape(config.o_groups, config.o_lora_rank, -1)
                layers.append(value.to(dtypes[rule.dtype]))
            parts.append(torch.cat(layers))
        result[rule.name] = torch.stack(parts).contiguous()
    return result


def test_payload_equals_plain_stacking_byte_for_byte(served: Path, tmp_path: Path) -> None:
    summary = prepack(served, ranks=RANKS)
    assert summary.path == served / NAME
    expected = expected_payload(served)
    assert len(expected) == 49
    save_file(expected, tmp_path / "expected")
    with SafetensorsFile(summary.path) as ours, SafetensorsFile(tmp_path / "expected") as theirs:
        assert list(ours.entries) == list(theirs.entries)
        assert ours.pread(ours.payload_begin, ours.size - ours.payload_begin) == theirs.pread(
            theirs.payload_begin, theirs.size - theirs.payload_begin
        )
        for name, entry in theirs.entries.items():
            assert (ours.entries[name].dtype, ours.entries[name].shape) == (entry.dtype, entry.shape)
    assert verify(served).sound


def test_metadata_follows_the_format(served: Path) -> None:
    prepack(served, ranks=RANKS)
    _, weight_map = description(served)
    files = [
        [name, (served / name).stat().st_size, (served / name).stat().st_mtime_ns]
        for name in sorted(set(weight_map.values()))
    ]
    content = {
        "format": "pypto-deepseek-v4-stacked-v1",
        "ranks": RANKS,
        "n_routed_experts": 8,
        "compress_ratios": [0, 4, 128, 4],
        "num_hash_layers": 2,
        "weight_map": sorted([name, shard] for name, shard in weight_map.items()),
        "source_files": files,
    }
    with SafetensorsFile(served / NAME) as file:
        assert file.metadata["format"] == "pypto-deepseek-v4-stacked-v1"
        assert (
            file.metadata["source_fingerprint"]
            == hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        )
    shard = served / files[0][0]
    assert stat.S_IMODE((served / NAME).stat().st_mode) == stat.S_IMODE(shard.stat().st_mode) & 0o666


def test_sidecar_is_mapped_without_copies(served: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepack(served, ranks=RANKS)
    with caplog.at_level(logging.INFO, "dsv4.checkpoint.sidecar"):
        decision = decide(served)
    assert decision.state == "mapped"
    assert decision.tensors is not None
    assert [record.message for record in caplog.records] == [decision.reason]
    for name, values in expected_payload(served).items():
        assert torch.equal(decision.tensors[name].view(torch.uint8), values.view(torch.uint8)), name
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if NAME in line]
    assert len(lines) == 1
    assert lines[0].split()[1].startswith("r--s")


def touch(served: Path) -> None:
    for shard in served.glob("model-*.safetensors"):
        os.utime(shard)


def change_content(served: Path) -> None:
    """Size and modification time stay."""
    shard = min(served.glob("model-*.safetensors"))
    status = shard.stat()
    with shard.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x55")
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))


def rewrite(change: Callable[[dict[str, torch.Tensor], dict[str, str]], Any]) -> Callable[[Path], None]:
    def apply(served: Path) -> None:
        with SafetensorsFile(served / NAME) as file:
            metadata = dict(file.metadata)
        tensors = load_file(served / NAME)
        change(tensors, metadata)
        save_file(tensors, served / NAME, metadata=metadata)

    return apply


STATES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "missing": (lambda served: (served / NAME).unlink(), "missing", "dsv4 prepack"),
    "shards touched": (touch, "mapped", "shared by all ranks"),
    "shard changed in place": (change_content, "stale", "--force"),
    "index changed": (
        lambda served: edit_json(served / INDEX, lambda content: content["weight_map"].pop("norm.weight") and None),
        "stale",
        "--force",
    ),
    "other format": (rewrite(lambda _, metadata: metadata.update(format="v0")), "stale", "--force"),
    "other fingerprints": (
        rewrite(lambda _, metadata: metadata.update(source_fingerprint="", content_fingerprint="")),
        "stale",
        "--force",
    ),
    "tensor missing": (rewrite(lambda tensors, _: tensors.pop("wkv")), "stale", "--force"),
    "wrong shape": (rewrite(lambda tensors, _: tensors.update(wkv=tensors["wkv"][:2].clone())), "corrupt", "--force"),
    "wrong dtype": (rewrite(lambda tensors, _: tensors.update(wkv=tensors["wkv"].half())), "corrupt", "--force"),
    "truncated": (lambda served: os.truncate(served / NAME, 100_000), "corrupt", "--force"),
    "empty": (lambda served: os.truncate(served / NAME, 0), "corrupt", "--force"),
}


@pytest.mark.parametrize("case", STATES)
def test_decisions_at_start_up(served: Path, case: str) -> None:
    prepack(served, ranks=RANKS)
    make, state, remedy = STATES[case]
    make(served)
    decision = decide(served)
    assert decision.state == state
    assert (decision.tensors is not None) == (state == "mapped")
    assert remedy in decision.reason
    assert "\n" not in decision.reason


def test_sidecar_of_another_tool_is_judged_by_file_times(served: Path) -> None:
    prepack(served, ranks=RANKS)
    rewrite(lambda _, metadata: [metadata.pop(key) for key in ("content_fingerprint", "slab_xxh3")])(served)
    assert decide(served).state == "mapped"
    touch(served)
    assert decide(served).state == "stale"


def test_copied_checkpoint_is_not_stale(served: Path, tmp_path: Path) -> None:
    prepack(served, ranks=RANKS)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in served.iterdir():
        shutil.copyfile(path, copy / path.name)
    assert decide(copy).state == "mapped"


def test_cold_sidecar_is_read_or_refused(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepack(served, ranks=RANKS)
    monkeypatch.setattr(sidecar, "resident_share", lambda *_: 0.5)
    assert decide(served).state == "mapped"
    refused = decide(served, read_if_cold=False)
    assert refused.state == "cold"
    assert "--warm" in refused.reason
    monkeypatch.setattr(sidecar, "_fits_in_memory", lambda _: False)
    assert decide(served).state == "cold"


def test_residency_of_a_file_just_read(served: Path) -> None:
    prepack(served, ranks=RANKS, warm=True)
    with SafetensorsFile(served / NAME) as file:
        assert sidecar.resident_share(file.fileno(), file.size) == 1.0


FAULTS: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "exists": (lambda served: (served / NAME).write_bytes(b"old"), {}, "--force"),
    "ranks do not divide": (lambda _: None, {"ranks": 3}, "ranks is 3"),
    "no ranks": (lambda _: None, {"ranks": 0}, "ranks is 0"),
    "no directory": (shutil.rmtree, {}, "no such directory"),
    "incomplete conversion": (
        lambda served: edit_json(
            served / ".pypto-w8a8-conversion.json", lambda content: content.update(complete=False)
        ),
        {},
        "incomplete",
    ),
    "source checkpoint": (
        lambda served: edit_json(
            served / "config.json", lambda content: content.update(quantization_config={"quant_method": "fp8"})
        ),
        {},
        "dsv4 convert",
    ),
    "truncated shard": (
        lambda served: os.truncate(min(served.glob("model-*")), 5000),
        {},
        "model-00001-of-00003.safetensors",
    ),
    "expert missing": (
        lambda served: edit_json(
            served / INDEX,
            lambda content: content["weight_map"].pop("layers.0.ffn.experts.1.w1.weight") and None,
        ),
        {},
        "layers.0.ffn.experts.1.w1.weight",
    ),
    "path traversal": (
        lambda served: edit_json(
            served / INDEX, lambda content: content["weight_map"].update({"norm.weight": "../x.safetensors"})
        ),
        {},
        "unsafe",
    ),
    "output is a directory": (lambda served: (served / NAME).mkdir(), {"force": True}, "not a file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_prepack_faults(served: Path, fault: str) -> None:
    make, options, named = FAULTS[fault]
    make(served)
    before = {path.name for path in served.iterdir()} if served.exists() else set()
    with pytest.raises(Dsv4Error) as raised:
        prepack(served, **{"ranks": RANKS} | options)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)
    assert ({path.name for path in served.iterdir()} if served.exists() else set()) == before


def test_force_replaces_and_output_names_another_path(served: Path, tmp_path: Path) -> None:
    (served / NAME).write_bytes(b"old")
    prepack(served, ranks=RANKS, force=True)
    prepack(served, ranks=RANKS, output=tmp_path / "other.safetensors")
    assert (tmp_path / "other.safetensors").read_bytes() == (served / NAME).read_bytes()


def test_too_little_space(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="GB are needed"):
        prepack(served, ranks=RANKS)
    assert not list(served.glob("*stacked*"))


def test_interrupted_run_continues(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepack(served, ranks=RANKS, output=tmp_path / "clean")
    module = sys.modules["dsv4_converter.prepack"]
    monkeypatch.setattr(module, "_CHECKPOINT_BYTES", 100_000)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4096)
    stop = threading.Event()
    recorded: list[int] = []
    original = module._Packing._record

    def record(self: Any, steps: int) -> None:
        original(self, steps)
        recorded.append(steps)
        if len(recorded) == 3:
            stop.set()

    monkeypatch.setattr(module._Packing, "_record", record)
    with pytest.raises(ConversionCancelledError):
        prepack(served, ranks=RANKS, cancelled=stop)
    assert not (served / NAME).exists()
    assert len(list(served.glob(".*stacked*"))) == 2  # the data and the record of how far it is durable
    summary = prepack(served, ranks=RANKS)
    assert summary.resumed_bytes > 300_000
    assert (served / NAME).read_bytes() == (tmp_path / "clean").read_bytes()
    assert not list(served.glob(".*stacked*"))


@pytest.mark.parametrize("damage", ["record", "data", "shards"])
def test_unusable_leftovers_are_dropped(served: Path, tmp_path: Path, damage: str) -> None:
    leftover, progress = served / f".{NAME}.tmp", served / f".{NAME}.progress"
    leftover.write_bytes(b"x" * 100)
    if damage != "record":
        progress.write_text(json.dumps({"metadata": {}, "steps": 5, "digests": {}}))
    else:
        progress.write_text("{")
    summary = prepack(served, ranks=RANKS)
    assert summary.resumed_bytes == 0
    assert verify(served).sound
    assert not list(served.glob(".*stacked*"))


def test_payload_damage_is_found_by_verify(served: Path) -> None:
    prepack(served, ranks=RANKS)
    with (served / NAME).open("r+b") as stream:
        stream.seek(-3, os.SEEK_END)
        stream.write(b"\x55")
    problems = verify(served).problems
    assert [problem.text for problem in problems] == ["payload differs from its digest"]


def test_ranks_must_be_positive_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ranks is -1"):
        prepack(tmp_path / "none", ranks=-1)

"""Whole conversions of small checkpoints of every variant."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4.checkpoint.names import expected_tensors
from dsv4.checkpoint.safetensors_file import SafetensorsFile
from dsv4.errors import ConfigurationError
from dsv4_converter import convert, numba_kernels
from dsv4_converter.dimensions import Dimensions
from safetensors.torch import load_file, save_file

from tests.unit.converter.checkpoints import (
    Layout,
    Tensor,
    dequantize,
    make_source,
    read_shard,
    round_to_nearest,
    variant,
)

RUN_COMMAND = """
import typer
from dsv4.cli import checkpoint_commands
app = typer.Typer()
app.callback()(lambda: None)
checkpoint_commands.register(app)
app()
"""
MARKER = ".pypto-w8a8-conversion.json"
BF16_WEIGHTS = (".wq_a.weight", ".attn.wkv.weight", ".wo_a.weight", "main_proj.weight")

VARIANTS = {
    "flash": variant(split_scales=True),
    "one shard": variant(shards=1),
    "base": variant(expert_dtype="fp8", float_scales=True, ratios=(0, 4)),
    "three mtp blocks": variant(mtp=3, ratios=(0, 128)),
    "drafter": variant(mtp=3, ratios=(0, 4, 128), dspark_targets=(0, 1, 2)),
    "pro": variant(hidden=224, o_groups=16, o_lora=20, ratios=(128, 128, 4), experts=12, q_lora=64),
    "no mtp": variant(mtp=0, ratios=(4,)),
    "heavy tails": variant(degrees_of_freedom=3, ratios=(0, 4)),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {name: make_source(root / name, layout) for name, layout in VARIANTS.items()}


def weight_map(directory: Path) -> dict[str, str]:
    content: dict[str, Any] = json.loads((directory / "model.safetensors.index.json").read_text())
    result: dict[str, str] = content["weight_map"]
    return result


def source_tensors(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in set(weight_map(directory).values()):
        tensors.update(read_shard(directory / shard))
    return tensors


def expected_shards(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The round-to-nearest conversion by plain torch operations."""
    tensors = source_tensors(directory)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
    for name, shard in weight_map(directory).items():
        if name.endswith(".scale"):
            continue
        out = shards.setdefault(shard, {})
        scale_name = name.removesuffix(".weight") + ".scale"
        dtype, shape, content = tensors[name]
        if scale_name not in tensors:
            out[name] = torch.frombuffer(bytearray(content), dtype=dtypes[dtype]).view(shape)
        elif name.endswith(BF16_WEIGHTS):
            out[name] = dequantize(tensors[name], tensors[scale_name]).bfloat16()
        else:
            out[name], out[scale_name] = round_to_nearest(dequantize(tensors[name], tensors[scale_name]))
    return shards


@pytest.mark.parametrize("name", VARIANTS)
def test_rtn_equals_the_rule_byte_for_byte(sources: dict[str, Path], tmp_path: Path, name: str) -> None:
    convert(sources[name], tmp_path / "out", rounding="rtn", verify=True)
    for shard, tensors in expected_shards(sources[name]).items():
        save_file(tensors, tmp_path / "expected", metadata={"format": "pt"})
        assert (tmp_path / "out" / shard).read_bytes() == (tmp_path / "expected").read_bytes(), shard


@pytest.mark.parametrize("name", VARIANTS)
def test_exact_is_complete_and_never_worse(sources: dict[str, Path], tmp_path: Path, name: str) -> None:
    summary = convert(sources[name], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = expected_tensors(Dimensions.from_config(config), "w8a8")
    found: dict[str, torch.Tensor] = {}
    for shard in summary.shards:
        found.update(load_file(tmp_path / "out" / shard))
        with SafetensorsFile(tmp_path / "out" / shard) as file:
            for tensor, entry in file.entries.items():
                assert entry.shape == expected[tensor].shape
                assert entry.dtype in expected[tensor].dtypes
    assert found.keys() == expected.keys() == weight_map(tmp_path / "out").keys()
    tensors = source_tensors(sources[name])
    lossless = 0
    for tensor, values in found.items():
        if values.dtype != torch.int8:
            continue
        scale_name = tensor.removesuffix(".weight") + ".scale"
        weights = dequantize(tensors[tensor], tensors[scale_name])
        scales = found[scale_name]
        error = (weights.double() - values.double() * scales.double()[:, None]).square().sum(dim=1)
        codes, nearest = round_to_nearest(weights)
        assert (error <= (weights.double() - codes.double() * nearest.double()[:, None]).square().sum(dim=1)).all()
        if tensors[tensor][0] == "I8":
            lossless += int((error == 0).sum())
    counted = sum(count for kind, (_, count) in summary.lossless.items() if "ffn.experts" in kind)
    assert counted == lossless


def test_many_jobs_and_compiled_kernels_change_nothing(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rounding in ("exact", "rtn"):
        convert(sources["heavy tails"], tmp_path / rounding, rounding=rounding)  # type: ignore[arg-type]
    module = sys.modules["dsv4_converter.convert"]
    monkeypatch.setattr(module, "choose_kernels", lambda _: numba_kernels)
    for rounding in ("exact", "rtn"):
        convert(  # type: ignore[call-overload]
            sources["heavy tails"], tmp_path / f"{rounding}-jobs", rounding=rounding, jobs=3, memory_bytes=1
        )
        assert read_tree(tmp_path / rounding) == read_tree(tmp_path / f"{rounding}-jobs")


OFFICIAL_ENCODING = """
DEFAULT_REASONING_EFFORT = "low"
REASONING_EFFORT_PROMPTS = {"low": "", "high": "a", "max": "b"}
"""


def read_tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_config_index_and_marker(sources: dict[str, Path], tmp_path: Path) -> None:
    source, out = sources["flash"], tmp_path / "out"
    summary = convert(source, out)
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    original = json.loads((source / "config.json").read_text())
    del original["quantization_config"]
    assert config.pop("dsv4_reasoning_effort_profile") == "preview"
    assert config == original
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    assert quantization["ignore"] == [
        *(f"layers.0.attn.{name}" for name in ("wq_a", "wkv", "wo_a")),
        *(f"layers.1.attn.{name}" for name in ("wq_a", "wkv", "wo_a", "indexer.weights_proj")),
        *(f"layers.1.attn.{name}" for name in ("indexer.compressor.wgate", "indexer.compressor.wkv")),
        *(f"layers.1.attn.{name}" for name in ("compressor.wgate", "compressor.wkv")),
        *(f"layers.2.attn.{name}" for name in ("wq_a", "wkv", "wo_a", "compressor.wgate", "compressor.wkv")),
        *(f"layers.3.attn.{name}" for name in ("wq_a", "wkv", "wo_a", "indexer.weights_proj")),
        *(f"layers.3.attn.{name}" for name in ("indexer.compressor.wgate", "indexer.compressor.wkv")),
        *(f"layers.3.attn.{name}" for name in ("compressor.wgate", "compressor.wkv")),
        *(f"mtp.0.attn.{name}" for name in ("wq_a", "wkv", "wo_a")),
        "mtp.0.head",
        "head",
    ]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    payload = 0
    for shard in summary.shards:
        with SafetensorsFile(out / shard) as file:
            payload += file.size - file.payload_begin
    assert index["metadata"]["total_size"] == payload
    marker = json.loads((out / MARKER).read_text())
    digest = hashlib.sha256()
    for shard in sorted(summary.shards):
        digest.update(shard.encode() + hashlib.sha256((source / shard).read_bytes()).digest())
    assert marker["format"] == "pypto-deepseek-v4-w8a8-v2"
    assert marker["complete"] is True
    assert marker["input_dir"] == str(source)
    assert marker["source_shards_sha256"] == digest.hexdigest()
    assert marker["source_config_sha256"] == hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    assert marker["rounding"] == "exact"
    assert {path.name for path in out.iterdir()} == {
        MARKER,
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "generation_config.json",
        *summary.shards,
    }
    assert summary.not_copied == ["LICENSE"]


@pytest.mark.parametrize(
    ("encoding", "config", "expected"),
    [
        (None, {}, "preview"),
        ("REASONING_EFFORT_MAX = 'x'", {}, "preview"),
        (OFFICIAL_ENCODING, {}, "official"),
        (None, {"dsv4_reasoning_effort_profile": "official"}, "official"),
    ],
)
def test_reasoning_effort_revision(tmp_path: Path, encoding: str | None, config: dict[str, Any], expected: str) -> None:
    source = make_source(tmp_path / "source", variant(ratios=(0,), experts=8, config=config))
    if encoding is not None:
        (source / "encoding").mkdir()
        (source / "encoding" / "encoding_dsv4.py").write_text(encoding)
    convert(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dsv4_reasoning_effort_profile"] == expected


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_output_honours_the_umask(sources: dict[str, Path], tmp_path: Path, mask: int) -> None:
    previous = os.umask(mask)
    try:
        convert(sources["one shard"], tmp_path / "out")
    finally:
        os.umask(previous)
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path.name


def test_dry_run_writes_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    summary = convert(sources["flash"], tmp_path / "out", dry_run=True)
    assert summary.dry_run
    assert summary.output_bytes == convert(sources["flash"], tmp_path / "real").output_bytes
    assert list(tmp_path.iterdir()) == [tmp_path / "real"]


def test_hugging_face_cache_layout(tmp_path: Path) -> None:
    """Snapshots are directories of symbolic links into a blob store."""
    plain = make_source(tmp_path / "plain")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in plain.iterdir():
        blob = blobs / hashlib.sha256(path.name.encode()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    convert(snapshot, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "tokenizer.json").read_text()


def test_unicode_paths_in_an_ascii_locale(tmp_path: Path) -> None:
    source = make_source(tmp_path / "模型 x", variant(ratios=(0,), experts=8))
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", RUN_COMMAND, "convert", "--input-dir", source, "--output-dir", tmp_path / "出"]
    finished = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert b"Conversion complete" in finished.stdout
    assert json.loads((tmp_path / "出" / MARKER).read_text())["input_dir"] == str(source)


def test_progress_counts_every_byte(sources: dict[str, Path], tmp_path: Path) -> None:
    events: list[Any] = []
    summary = convert(sources["flash"], tmp_path / "out", progress=events.append)
    assert events[0].kind == "start"
    assert events[-1].kind == "done"
    assert [event.message for event in events if event.kind == "file"] == sorted(summary.shards)
    assert summary.source_bytes - events[-1].bytes_done < 100_000  # headers are not counted


def test_wrong_options_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="rounding"):
        convert(sources["flash"], tmp_path / "out", rounding="down")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="jobs"):
        convert(sources["flash"], tmp_path / "out", jobs=0)


def test_importing_the_package_loads_neither_torch_nor_numba() -> None:
    code = "import sys, dsv4_converter; sys.exit(bool({'torch', 'numba'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(
    "PYPTO_SERVING_ROOT" not in os.environ, reason="PYPTO_SERVING_ROOT does not name a checkout of pypto-serving"
)
@pytest.mark.parametrize("name", ["flash", "one shard", "heavy tails"])
def test_rtn_equals_the_upstream_converter(sources: dict[str, Path], tmp_path: Path, name: str) -> None:
    script = Path(os.environ["PYPTO_SERVING_ROOT"]) / "scripts" / "convert_deepseek_v4_to_w8a8.py"
    command = [sys.executable, script, "--input-dir", sources[name], "--output-dir", tmp_path / "theirs"]
    subprocess.run(command, check=True)
    summary = convert(sources[name], tmp_path / "ours", rounding="rtn")
    for shard in summary.shards:
        theirs, ours = load_file(tmp_path / "theirs" / shard), load_file(tmp_path / "ours" / shard)
        assert theirs.keys() == ours.keys()
        for tensor, values in theirs.items():
            assert values.dtype == ours[tensor].dtype
            assert torch.equal(values.view(torch.uint8), ours[tensor].view(torch.uint8)), tensor
    their_marker = json.loads((tmp_path / "theirs" / MARKER).read_text())
    our_marker = json.loads((tmp_path / "ours" / MARKER).read_text())
    assert {key: our_marker[key] for key in their_marker} == their_marker


def test_real_tensor_dimensions(tmp_path: Path) -> None:
    """One layer with the widths of Flash, one expert and few heads, against the rule."""
    layout = Layout(
        hidden=4096,
        intermediate=2048,
        heads=4,
        head_dim=512,
        q_lora=1024,
        o_lora=128,
        vocab=64,
        experts=1,
        hash_layers=0,
        ratios=(0,),
        mtp=0,
        shards=1,
    )
    source = make_source(tmp_path / "source", layout)
    convert(source, tmp_path / "out", rounding="rtn")
    for shard, tensors in expected_shards(source).items():
        found = load_file(tmp_path / "out" / shard)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], values) for name, values in tensors.items())

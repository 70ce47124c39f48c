"""Verification: what a sound checkpoint reports, and that every kind of damage is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dsv4.errors import ConfigurationError
from dsv4_converter import convert, verify
from dsv4_converter.verify_report import json_report, text_report, write_report

from tests.unit.converter.checkpoints import Tensor, dequantize, make_source, read_shard, round_to_nearest, variant
from tests.unit.converter.test_convert import RUN_COMMAND
from tests.unit.converter.test_source_faults import bf16_nan, byte, edit_json, infinite_float, shard_of, tensor

MARKER = ".pypto-w8a8-conversion.json"
WQ_B = "layers.0.attn.wq_b"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify")
    make_source(root / "source", variant(ratios=(0, 4), experts=8, degrees_of_freedom=3))
    convert(root / "source", root / "served", rounding="rtn")
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "root"))


def test_error_against_the_source_is_exact(pristine: Path) -> None:
    report = verify(pristine / "served", source=pristine / "source")
    assert report.sound, report.problems
    tensors = read_shard(shard_of(pristine / "source", f"{WQ_B}.weight"))
    weights = dequantize(tensors[f"{WQ_B}.weight"], tensors[f"{WQ_B}.scale"])
    codes, scales = round_to_nearest(weights)
    error = weights.double() - codes.double() * scales.double()[:, None]
    statistics = report.statistics["layers.0 attn.wq_b"]
    assert statistics.relative_error == pytest.approx((error.norm() / weights.double().norm()).item(), rel=1e-9)
    rows = error.norm(dim=1) / weights.double().norm(dim=1)
    assert statistics.worst_row_error == pytest.approx(rows.max().item(), rel=1e-9)
    assert statistics.lossless_rows == int((rows == 0).sum())
    assert statistics.rows == len(weights)
    assert (statistics.least_code, statistics.greatest_code) == (int(codes.min()), int(codes.max()))
    assert sum(statistics.scale_exponents.values()) == len(weights)


def test_exact_rounding_reports_lossless_experts(pristine: Path, tmp_path: Path) -> None:
    summary = convert(pristine / "source", tmp_path / "exact")
    report = verify(tmp_path / "exact", source=pristine / "source")
    nearest = verify(pristine / "served", source=pristine / "source")
    for kind, statistics in report.statistics.items():
        assert statistics.lossless_rows >= summary.lossless[kind][1]
        assert statistics.relative_error <= nearest.statistics[kind].relative_error
    experts = [kind for kind in report.statistics if "ffn.experts" in kind]
    assert sum(report.statistics[kind].lossless_rows for kind in experts) > 0


def without_checksums(root: Path) -> None:
    edit_json(root / "served" / MARKER, lambda content: content.update(shards={}))


def served(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        without_checksums(root)
        tensor(name, change)(root / "served")

    return apply


def float_value(index: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(old: Tensor) -> Tensor:
        array = np.frombuffer(old[2], np.float32).copy()
        array[index] = value
        return old[0], old[1], array.tobytes()

    return change


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit flip": (lambda root: flip(shard_of(root / "served", f"{WQ_B}.weight")), "checksum differs"),
    "code out of range": (served(f"{WQ_B}.weight", byte(9, 3, 0x80)), "row 9: code -128"),
    "scale NaN": (served(f"{WQ_B}.scale", float_value(3, float("nan"))), "row 3: scale is nan"),
    "scale negative": (served(f"{WQ_B}.scale", float_value(4, -1.0)), "row 4: scale is -1"),
    "scale zero": (served(f"{WQ_B}.scale", float_value(4, 0.0)), "row 4: scale is 0"),
    "BF16 NaN": (served("layers.0.attn.wq_a.weight", bf16_nan), "NaN or infinity"),
    "plain NaN": (served("norm.weight", bf16_nan), "NaN or infinity"),
    "plain infinity": (served("layers.0.attn.attn_sink", infinite_float), "NaN or infinity"),
    "expert number": (
        served("layers.0.ffn.gate.tid2eid", lambda t: (t[0], t[1], b"\x99" + t[2][1:])),
        "names an expert",
    ),
    "tensor missing": (served("norm.weight", lambda _: None), "norm.weight is missing"),
    "incomplete": (
        lambda root: edit_json(root / "served" / MARKER, lambda content: content.update(complete=False)),
        "incomplete",
    ),
    "truncated": (lambda root: os.truncate(shard_of(root / "served", "norm.weight"), 3000), "structure"),
    "broken marker": (lambda root: (root / "served" / MARKER).write_text("["), "not valid JSON"),
    "missing directory": (lambda root: shutil.rmtree(root / "served"), "no such directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(root: Path, damage: str) -> None:
    make, named = DAMAGE[damage]
    make(root)
    report = verify(root / "served")
    assert not report.sound
    assert named in text_report(report)
    assert json_report(report)["sound"] is False


DIFFERENCES = {
    "copied tensor": served("norm.weight", lambda t: (t[0], t[1], b"\x01\x3f" + t[2][2:])),
    "rounded tensor": served("layers.0.attn.wq_a.weight", lambda t: (t[0], t[1], b"\x01\x3f" + t[2][2:])),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_difference_from_the_source_is_found(root: Path, difference: str) -> None:
    DIFFERENCES[difference](root)
    assert verify(root / "served").sound
    assert not verify(root / "served", source=root / "source").sound


def test_source_of_another_model_is_refused(pristine: Path, tmp_path: Path) -> None:
    other = make_source(tmp_path / "other", variant(ratios=(0,), experts=8))
    with pytest.raises(ConfigurationError, match="another model"):
        verify(pristine / "served", source=other)


def test_report_files_and_pictures(pristine: Path, tmp_path: Path) -> None:
    report = verify(pristine / "served", source=pristine / "source")
    paths = write_report(report, tmp_path / "report")
    assert sorted(path.name for path in paths) == ["error.png", "report.json", "report.txt", "scales.png"]
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert content["sound"] is True
    assert {entry["kind"] for entry in content["weights"]} >= {"attn.wq_b", "ffn.experts.w1"}
    for name in ("error.png", "scales.png"):
        assert (tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG")


def test_verification_does_not_import_matplotlib(pristine: Path) -> None:
    code = f"import sys, dsv4_converter as c; c.verify({str(pristine / 'served')!r}); "
    code += "import dsv4_converter.verify_report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("sound", [True, False])
def test_exit_code_of_the_command(root: Path, sound: bool) -> None:
    if not sound:
        flip(shard_of(root / "served", "norm.weight"))
    command = [sys.executable, "-c", RUN_COMMAND, "verify", root / "served", "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == (0 if sound else 1)
    assert json.loads(finished.stdout)["sound"] is sound

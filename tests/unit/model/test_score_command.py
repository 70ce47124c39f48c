from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from dsv4.cli.score_command import read_ids, register
from dsv4.errors import ConfigurationError
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.unit.model.random_model import VECTORS


def run(*arguments: str) -> None:
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["score", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_float_scores_are_the_recorded_logits(tmp_path: Path) -> None:
    expected = load_file(VECTORS / "expected.safetensors")
    (tmp_path / "ids.json").write_text(json.dumps({"ids": expected["ids"].tolist()}))
    out = tmp_path / "scores.safetensors"
    run("--model", str(VECTORS), "--ids", str(tmp_path / "ids.json"), "--numerics", "float", "--out", str(out))
    scores = load_file(out)
    assert set(scores) == {"logits", "mtp_logits"}
    for name, values in scores.items():
        assert values.shape == expected[f"float.{name}"].shape
        assert (values - expected[f"float.{name}"]).abs().max() < 1e-3


def test_one_token_has_logits_and_no_prediction(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[7]")
    out = tmp_path / "scores.safetensors"
    run("--model", str(VECTORS), "--ids", str(tmp_path / "ids.json"), "--out", str(out))
    scores = load_file(out)
    assert list(scores) == ["logits"]
    assert scores["logits"].shape == (1, 97)
    assert torch.isfinite(scores["logits"]).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "neither a list"),
        ('{"tokens": [1]}', "neither a list"),
        ("[1, 97]", r"ids\[1\] is 97"),
        ("[1, true]", r"ids\[1\] is True"),
        ("[1,", "not JSON"),
    ],
)
def test_wrong_ids_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ids.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_ids(path, 97)

"""`dsv4 serve` offers every engine flag, and docs/serve.md lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from dsv4.cli import serve_command
from dsv4.cli.engine_options import engine_environment
from dsv4.config import EngineConfig
from dsv4.config.engine_config import flags_table
from dsv4.triton.stack import StackSettings
from typer.testing import CliRunner

from tests.tools.update_flags_table import BEGIN, END, PAGE

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "model_repository" / "deepseek_v4" / "1" / "engine.json"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[StackSettings]:
    settings: list[StackSettings] = []

    def run(given: StackSettings, installation: Any) -> int:
        settings.append(given)
        return 0

    monkeypatch.setattr(serve_command, "_run", run)
    monkeypatch.setattr(serve_command, "resolve_model", lambda model, **_: Path(model or "/nowhere/dsv4-nano"))
    monkeypatch.setattr(serve_command, "find_installation", lambda server: None)
    return settings


def serve(*arguments: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    serve_command.register(app)
    return CliRunner().invoke(app, ["serve", *arguments])


def test_documentation_lists_every_flag() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition(BEGIN)[2].partition(END)[0]
    assert table == flags_table(), "run python -m tests.tools.update_flags_table"


def test_flags_of_the_documented_serving_command(started: list[StackSettings]) -> None:
    result = serve(
        *("--model", "/checkpoint", "--served-model-name", "dsv4-flash-w8a8", "--platform", "a2a3"),
        *("--dp", "8", "--ep", "8", "--tp", "1", "--block-size", "128", "--max-model-len", "512"),
        *("--max-num-seqs", "32", "--max-num-batched-tokens", "512", "--long-prefill-token-threshold", "2048"),
        *("--speculative-config", '{"method":"mtp","num_speculative_tokens":3}', "--no-enable-prefix-caching"),
        *("--ring-dep-pool", "131072", "--ring-task-window", "131072", "--ring-heap", "2147483648"),
        *("--port", "8225", "--show-startup-logs"),
    )
    assert result.exit_code == 0, result.output
    [settings] = started
    config = EngineConfig.build(file=FILE, environment=settings.engine_environment)
    assert (config.model, config.dp, config.max_model_len, config.num_drafts) == ("/checkpoint", 8, 512, 3)
    assert settings.port == 8225
    assert settings.show_startup_logs
    assert settings.proxy_options[:3] == ["--served-model-name", "dsv4-flash-w8a8", "deepseek_v4"]


def test_only_given_flags_go_to_the_environment(started: list[StackSettings]) -> None:
    assert serve("--max-num-seqs", "4").exit_code == 0
    assert started[0].engine_environment == {"DSV4_MAX_NUM_SEQS": "4"}


def test_deprecated_alias_overrides_the_file() -> None:
    environment = engine_environment({"num_speculative_tokens": 2})
    assert EngineConfig.build(file=FILE, environment=environment).num_drafts == 2


def test_the_shipped_file_is_valid_and_speculates() -> None:
    assert EngineConfig.build(file=FILE, environment={}).num_drafts == 1


def test_wrong_flags_are_refused_before_anything_starts(started: list[StackSettings]) -> None:
    assert "--max-num-seqs" in str(serve("--max-num-seqs", "0").exception)
    assert serve("--max-num-seq", "1").exit_code == 2
    assert "unexpected argument 'stray'" in str(serve("stray").exception)
    assert started == []


def test_options_behind_two_dashes_go_to_the_proxy(started: list[StackSettings]) -> None:
    assert serve("--generate-config", "{}", "--", "--api-key", "secret").exit_code == 0
    assert started[0].proxy_options[-4:] == ["--generate-config", "{}", "--api-key", "secret"]

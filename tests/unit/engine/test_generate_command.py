"""`dsv4 generate` on the checkpoint that ships with the project."""

from __future__ import annotations

import pytest
from dsv4.cli.generate_command import read_generate_config
from dsv4.cli.main import build_app
from dsv4.errors import ConfigurationError
from typer.testing import CliRunner

FLAGS = ["--max-model-len", "256", "--num-threads", "1"]


def test_prompts_run_together_and_print_in_order() -> None:
    config = '{"max_new_tokens": 4, "ignore_eos": true}'
    arguments = ["generate", "--prompt", "Huawei is", "--prompt", "The scheduler", "--generate-config", config]
    plain = CliRunner().invoke(build_app(), [*arguments, *FLAGS, "--show-token-ids"])
    assert plain.exit_code == 0, plain.output
    assert plain.stdout.index("[1/2] Huawei is") < plain.stdout.index("[2/2] The scheduler")
    assert plain.stdout.count("finish reason length, 4 tokens") == 2
    assert "8 tokens in" in plain.stderr
    speculation = '{"method":"mtp","num_speculative_tokens":3}'
    drafted = CliRunner().invoke(
        build_app(), [*arguments, *FLAGS, "--show-token-ids", "--speculative-config", speculation]
    )
    assert drafted.stdout == plain.stdout
    assert "drafts accepted" in drafted.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"max_new_token": 1}', "max_new_token"),
        ('{"max_new_tokens": "1"}', "max_new_tokens"),
        ('{"max_new_tokens": 0}', "max_tokens"),
        ('{"max_new_tokens": 1, "max_tokens": 1}', "mean the same"),
        ('{"top_p": 7}', "top_p"),
        ('{"temperature": true}', "temperature"),
    ],
)
def test_mistakes_in_the_generate_config_name_the_key(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read_generate_config(text)


def test_the_generate_config_is_read() -> None:
    parameters = read_generate_config('{"max_new_tokens": 20, "temperature": 0.5, "stop": "x"}')
    assert (parameters.max_tokens, parameters.temperature, parameters.stop) == (20, 0.5, ["x"])
    assert read_generate_config(None).greedy

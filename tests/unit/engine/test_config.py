"""The flags: sources, types, ranges, the limits of the NPU kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dsv4.config import EngineConfig
from dsv4.config.engine_config import FIELDS, flags_table, option_name
from dsv4.engine.metrics import METRICS
from dsv4.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[3]


def build(environment: dict[str, str] | None = None, **flags: Any) -> EngineConfig:
    return EngineConfig.build(environment=environment or {}, overrides=flags)


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"max_num_seqs": 4, "max-model-len": 256, "dp": 2}))
    environment = {"DSV4_MAX_NUM_SEQS": "5", "DSV4_DP": "4", "HOME": "/", "DSV4_CACHE_DIR": "x", "DSV4_FAULT_START": ""}
    config = EngineConfig.build(file=file, environment=environment, overrides={"dp": 8, "ep": None})
    assert (config.max_num_seqs, config.max_model_len, config.dp) == (5, 256, 8)
    assert EngineConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_num_seq": 1}, "max_num_seqs"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_seqs": "many"}, "--max-num-seqs"),
        ({"max_num_seqs": True}, "--max-num-seqs"),
        ({"max_num_seqs": 600}, "--max-num-batched-tokens"),
        ({"memory_utilization": 1.5}, "--memory-utilization"),
        ({"dp": 3}, "--dp"),
        ({"dp": 4, "ep": 2}, "--ep"),
        ({"tp": 2}, "--tp"),
        ({"block_size": 64}, "--block-size"),
        ({"backend": "gpu"}, "--backend"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"devices": "0,a"}, "--devices"),
        ({"hang_timeout_seconds": float("nan")}, "--hang-timeout-seconds"),
        ({"speculative_config": "{"}, "--speculative-config"),
        ({"speculative_config": {"method": "eagle", "num_speculative_tokens": 1}}, "mtp"),
        ({"speculative_config": {"method": "mtp"}}, "num_speculative_tokens"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 200}}, "127"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "k": 1}}, "'k'"),
        ({"speculative_config": '{"num_speculative_tokens": 1}', "num_speculative_tokens": 2}, "contradicts"),
    ],
)
def test_mistakes_are_named(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build(**flags)


def test_the_deprecated_alias_means_the_same() -> None:
    assert build(num_speculative_tokens=3).num_drafts == 3
    assert build(speculative_config='{"method":"mtp","num_speculative_tokens":3}').num_drafts == 3
    assert build().num_drafts == 0


@pytest.mark.parametrize(("name", "text"), [("DSV4_MAX_NUM_SEQ", "1"), ("DSV4_DEBUG_FILL_NAN", "maybe")])
def test_mistakes_in_the_environment_are_named(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        build(environment={name: text})


def test_the_prefill_extent_is_the_least_of_its_limits() -> None:
    limits = {"max_num_batched_tokens": 9000, "long_prefill_token_threshold": 0, "max_model_len": 9500}
    assert build(**limits).prefill_extent == 8192
    assert build(**{**limits, "max_model_len": 512}).prefill_extent == 512
    assert build(**{**limits, "long_prefill_token_threshold": 2048}).prefill_extent == 2048
    assert build(**{**limits, "max_num_batched_tokens": 600}).prefill_extent == 600


NPU = {
    "backend": "npu",
    "platform": "a2a3",
    "devices": "0,1,2,3,4,5,6,7",
    "dp": 8,
    "max_model_len": 512,
    "max_num_seqs": 16,
}


@pytest.mark.parametrize(("drafts", "most"), [(0, 64), (1, 64), (2, 32), (3, 32), (4, 16), (9, 16)])
def test_decode_tiles_limit_the_requests_on_npus_only(drafts: int, most: int) -> None:
    flags = {"num_speculative_tokens": drafts, "max_num_batched_tokens": 512}
    assert build(**{**NPU, **flags, "max_num_seqs": most}).max_num_seqs == most
    with pytest.raises(ConfigurationError, match=f"no higher than {most}"):
        build(**{**NPU, **flags, "max_num_seqs": most + 1})
    assert build(**flags, max_num_seqs=most + 1).max_num_seqs == most + 1


@pytest.mark.parametrize(
    "flags",
    [{"devices": "0,1"}, {"dp": 4}, {"max_model_len": 500}, {"max_model_len": 32768}, {"platform": None}],
    ids=lambda flags: next(iter(flags)),
)
def test_npu_requirements(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=option_name(next(iter(flags)))):
        build(**{**NPU, **flags})


def test_the_documentation_has_the_table_of_flags() -> None:
    assert flags_table() in (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    assert len(flags_table().splitlines()) == len(FIELDS) + 2


def test_the_documentation_has_every_metric() -> None:
    text = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    assert all(f"| `{metric.name}` | {metric.kind} | {metric.help} |" in text for metric in METRICS)

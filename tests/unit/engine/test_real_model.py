"""Greedy tokens of a real network do not depend on how the engine gets to them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dsv4.config import EngineConfig
from dsv4.engine.core import EngineCore
from dsv4.engine.loading import load_engine
from dsv4.engine.protocol import GenerateRequest
from dsv4.sampling_parameters import SamplingParameters

VECTORS = Path(__file__).resolve().parents[2] / "data" / "model"
NEW_TOKENS = 12
NUMBERS = random.Random(7)
PROMPTS = {str(length): [NUMBERS.randrange(97) for _ in range(length)] for length in (3, 127, 290)}
COMPANY = {f"company {index}": [NUMBERS.randrange(97) for _ in range(5 * index + 1)] for index in range(13)}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(**flags: object) -> EngineCore:
    overrides = {"model": str(VECTORS), "max_model_len": 512, "num_threads": 1, "debug_fill_nan": True, **flags}
    return load_engine(EngineConfig.build(environment={}, overrides=overrides), progress=lambda text: None)


def generate(core: EngineCore, prompts: dict[str, list[int]], **parameters: object) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        sampling = SamplingParameters(max_tokens=NEW_TOKENS, ignore_eos=True, **parameters)  # type: ignore[arg-type]
        core.add(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling_parameters=sampling))
    while core.has_work:
        for output in core.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return tokens


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    torch.set_num_threads(1)
    core = load(enable_prefix_caching=False)
    return {name: generate(core, {name: prompt})[name] for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize(
    "flags",
    [
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 3, "max_num_batched_tokens": 160},
        {"num_speculative_tokens": 9, "max_num_batched_tokens": 48},
        {"dp": 8, "max_num_batched_tokens": 48, "long_prefill_token_threshold": 16},
    ],
    ids=lambda flags: " ".join(f"{name}={value}" for name, value in flags.items()),
)
def test_speculation_chunks_and_company(flags: dict[str, object], alone: dict[str, list[int]]) -> None:
    tokens = generate(load(**flags), {**COMPANY, **PROMPTS})
    assert {name: tokens[name] for name in PROMPTS} == alone


@pytest.mark.parametrize("drafts", [0, 2])
def test_prefix_hits(drafts: int, alone: dict[str, list[int]]) -> None:
    core = load(num_speculative_tokens=drafts)
    for _ in range(2):
        assert generate(core, PROMPTS) == alone
    counters = {name: value for name, _, value in core.metrics.counters()}
    assert counters["dsv4_prefix_cache_hit_tokens_total"] == 256


def test_sampled_tokens_with_a_seed_do_not_depend_on_drafts() -> None:
    prompts = {name: PROMPTS[name] for name in ("3", "127")}
    first, second = (
        generate(load(num_speculative_tokens=drafts), prompts, temperature=0.9, seed=5, top_p=0.9, min_p=0.01)
        for drafts in (0, 2)
    )
    assert first == second

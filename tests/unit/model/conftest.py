from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dsv4.checkpoint import load_weights
from dsv4.config import ModelConfig, Numerics
from dsv4.model import DeepseekV4Model

from tests.unit.model.random_model import small_config, write_checkpoint


@pytest.fixture(autouse=True)
def _one_thread_without_gradients() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random")
    write_checkpoint(directory, small_config())
    return directory


@pytest.fixture(scope="session", params=["float", "w8a8"])
def random_model(request: pytest.FixtureRequest, random_checkpoint: Path) -> DeepseekV4Model:
    return load(random_checkpoint, request.param)


@pytest.fixture(scope="session")
def random_w8a8(random_checkpoint: Path) -> DeepseekV4Model:
    return load(random_checkpoint, "w8a8")


def load(directory: Path, numerics: Numerics) -> DeepseekV4Model:
    config = ModelConfig.from_directory(directory)
    return DeepseekV4Model(config, load_weights(directory, config, numerics=numerics), numerics=numerics)

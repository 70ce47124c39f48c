"""Weights of a checkpoint by official name, in the form the chosen numerics compute with."""

from __future__ import annotations

from pathlib import Path

from dsv4.config import ModelConfig
from dsv4.model.cache_pools import Numerics


class ModelWeights:
    """Read access to every weight of one checkpoint; see `load_weights`."""

    numerics: Numerics


def load_weights(directory: str | Path, config: ModelConfig, *, numerics: Numerics) -> ModelWeights:
    """Open a checkpoint directory, source or converted, and check every name, shape and dtype.

    Raises:
        CheckpointError: a file or tensor is missing or wrong; the message names both.
    """
    raise NotImplementedError

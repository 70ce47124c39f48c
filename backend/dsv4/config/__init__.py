"""Configuration, validated once: the model's config.json and the engine's flags."""

from dsv4.config.engine_config import EngineConfig
from dsv4.config.model_config import ModelConfig, Numerics, RopeScaling

__all__ = ["EngineConfig", "ModelConfig", "Numerics", "RopeScaling"]

"""Configuration, validated once: the model's config.json and the engine's flags."""

from dsv4.config.model_config import ModelConfig, RopeScaling

__all__ = ["ModelConfig", "RopeScaling"]

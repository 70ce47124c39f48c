"""Rotary positions: interleaved pairs on the last dimensions of a head, with two frequency tables.

Sliding-window layers turn with base `rope_theta`; compressed layers with `compress_rope_theta` and YaRN, for queries,
keys, entries, the indexer and the inverse rotation alike. No attention factor is applied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dsv4.config.model_config import ModelConfig, Numerics
from dsv4.model.ops import round_bf16


@dataclass(frozen=True)
class Rotation:
    """Factors of one set of positions.

    Attributes:
        cosine: [rows, rope_dim] FP32, each value twice side by side.
        sine: [rows, rope_dim] FP32, likewise, the first of a pair negated.
    """

    cosine: torch.Tensor
    sine: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the last `rope_dim` dimensions of x in place: [rows, width] or [rows, heads, width]. Returns x."""
        return _rotate_last(x, self.cosine, self.sine)

    def apply_inverse(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate back, in place."""
        return _rotate_last(x, self.cosine, -self.sine)


def _rotate_last(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    if x.dim() == 3:
        cosine, sine = cosine[:, None], sine[:, None]
    tail = x[..., -cosine.shape[-1] :]
    # (a, b) -> (a cos - b sin, a sin + b cos), written as x * cos + swap(x) * (-sin, sin).
    swapped = tail.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    tail.mul_(cosine).add_(swapped.mul_(sine))
    return x


class RotaryTable:
    """Inverse frequencies of one kind of layer, and the factors of given positions."""

    def __init__(self, frequencies: torch.Tensor, *, round_factors: bool) -> None:
        """frequencies [rope_dim / 2] FP32; `round_factors` rounds cos and sin to BF16, as the W8A8 kernels' tables."""
        self.frequencies = frequencies
        self._round = round_bf16 if round_factors else _identity

    def at(self, positions: torch.Tensor) -> Rotation:
        """Factors for positions [rows] int64."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        cosine = self._round(angles.cos())
        sine = self._round(angles.sin())
        return Rotation(cosine.repeat_interleave(2, dim=-1), torch.stack((-sine, sine), dim=-1).flatten(-2))


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def main_table(config: ModelConfig, *, numerics: Numerics, device: torch.device) -> RotaryTable:
    """Table of sliding-window and prediction layers."""
    frequencies = _base_frequencies(config.rope_theta, config.qk_rope_head_dim)
    return RotaryTable(frequencies.to(device), round_factors=numerics == "w8a8")


def compress_table(config: ModelConfig, *, numerics: Numerics, device: torch.device) -> RotaryTable:
    """Table of the compressed layers."""
    frequencies = _yarn_frequencies(config)
    return RotaryTable(frequencies.to(device), round_factors=numerics == "w8a8")


def _base_frequencies(theta: float, dims: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.int64).float() / dims)


def _yarn_frequencies(config: ModelConfig) -> torch.Tensor:
    """YaRN (Peng et al. 2023): interpolate the slow dimensions by `factor`, keep the fast ones, ramp in between."""
    scaling, dims, theta = config.rope_scaling, config.qk_rope_head_dim, config.compress_rope_theta

    def dimension_with(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_with(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_with(scaling.beta_slow)), dims - 1)
    ramp = (torch.arange(dims // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    kept = 1.0 - ramp.clamp(0.0, 1.0)
    base = _base_frequencies(theta, dims)
    return base / scaling.factor * (1.0 - kept) + base * kept

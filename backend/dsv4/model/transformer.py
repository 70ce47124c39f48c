"""The DeepSeek V4 network: rows in, residual streams and logits out."""

from __future__ import annotations

import torch

from dsv4.checkpoint.weights import ModelWeights
from dsv4.config import ModelConfig
from dsv4.model.batch import ForwardBatch
from dsv4.model.cache_pools import CachePools, Numerics


class DeepseekV4Model:
    """See the method docstrings for shapes; every method may run under `torch.inference_mode`."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, *, numerics: Numerics, device: str | torch.device = "cpu"
    ) -> None:
        raise NotImplementedError

    def forward(self, batch: ForwardBatch, pools: CachePools) -> torch.Tensor:
        """Run all hidden layers. Returns the residual streams [rows, hc_mult, hidden] FP32, before the head."""
        raise NotImplementedError

    def logits(self, bundle: torch.Tensor) -> torch.Tensor:
        """[rows, hc_mult, hidden] -> [rows, vocab] FP32."""
        raise NotImplementedError

    def forward_mtp(self, previous_bundle: torch.Tensor, batch: ForwardBatch, pools: CachePools) -> torch.Tensor:
        """Prediction layer at positions p from the streams of p and the tokens at p + 1. Returns its own streams."""
        raise NotImplementedError

    def mtp_logits(self, bundle: torch.Tensor) -> torch.Tensor:
        """Logits for position p + 2 from the streams of `forward_mtp`: [rows, hc_mult, hidden] -> [rows, vocab]."""
        raise NotImplementedError

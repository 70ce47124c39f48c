"""One transformer block: attention and mixture of experts, each inside a hyper-connection."""

from __future__ import annotations

import torch

from dsv4.checkpoint.weights import ModelWeights
from dsv4.config.model_config import ModelConfig
from dsv4.model.addressing import CallAddresses
from dsv4.model.attention import Attention, LayerPages
from dsv4.model.hyper_connection import HyperConnection
from dsv4.model.moe import MixtureOfExperts
from dsv4.model.ops import rms_norm, round_bf16


class Block:
    """A hidden layer or the body of a prediction layer.

    Args:
        prefix: `layers.N.` or `mtp.N.`.
        ratio: compress ratio of its attention.
        hashed: routing by token id.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        prefix: str,
        *,
        ratio: int,
        hashed: bool,
        device: torch.device,
    ) -> None:
        self._rounds = weights.numerics == "w8a8"
        self._epsilon = config.rms_norm_eps
        self._attention_connection = HyperConnection(config, weights, f"{prefix}hc_attn", device)
        self._attention_norm = weights.vector(f"{prefix}attn_norm.weight").to(device)
        self._attention = Attention(config, weights, f"{prefix}attn.", ratio=ratio, device=device)
        self._experts_connection = HyperConnection(config, weights, f"{prefix}hc_ffn", device)
        self.experts = MixtureOfExperts(config, weights, prefix, hashed=hashed, device=device)

    def __call__(
        self, bundle: torch.Tensor, token_ids: torch.Tensor, addresses: CallAddresses, pages: LayerPages
    ) -> torch.Tensor:
        """bundle [rows, streams, hidden] FP32 -> the same shape. In W8A8 too the streams are never rounded."""
        u, write_weights, mapping = self._attention_connection.read(bundle)
        x = rms_norm(self._rounded(u), self._attention_norm, self._epsilon)
        output = self._attention(self._rounded(x), addresses, pages)
        bundle = self._attention_connection.write(output, bundle, write_weights, mapping)

        u, write_weights, mapping = self._experts_connection.read(bundle)
        output = self.experts(self._rounded(u), token_ids)
        return self._experts_connection.write(output, bundle, write_weights, mapping)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return round_bf16(x) if self._rounds else x

"""Multi-token prediction: one more block that predicts token p + 2 from the streams of p and token p + 1."""

from __future__ import annotations

import torch

from dsv4.checkpoint.weights import ModelWeights
from dsv4.config.model_config import ModelConfig
from dsv4.model.addressing import CallAddresses
from dsv4.model.attention import LayerPages
from dsv4.model.block import Block
from dsv4.model.hyper_connection import HyperConnectionHead
from dsv4.model.int8_linear import Int8Linear
from dsv4.model.ops import linear, quantize_rows, rms_norm


class PredictionLayer:
    """Prediction layer `mtp.N`; embedding and output head are the model's."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, index: int, device: torch.device) -> None:
        prefix = f"mtp.{index}."
        self._epsilon = config.rms_norm_eps
        self._int8 = weights.numerics == "w8a8"
        self._embedding_norm = weights.vector(f"{prefix}enorm.weight").to(device)
        self._stream_norm = weights.vector(f"{prefix}hnorm.weight").to(device)
        if self._int8:
            self._embedding_int8 = Int8Linear(*weights.quantized(f"{prefix}e_proj.weight"), device)
            self._stream_int8 = Int8Linear(*weights.quantized(f"{prefix}h_proj.weight"), device)
        else:
            self._embedding_weight = weights.matrix(f"{prefix}e_proj.weight").to(device)
            self._stream_weight = weights.matrix(f"{prefix}h_proj.weight").to(device)
        self.block = Block(config, weights, prefix, ratio=config.mtp_ratio, hashed=False, device=device)
        self.head = HyperConnectionHead(config, weights, prefix, device)
        self.norm = weights.vector(f"{prefix}norm.weight").to(device)

    def __call__(
        self,
        previous_bundle: torch.Tensor,
        embedding: torch.Tensor,
        token_ids: torch.Tensor,
        addresses: CallAddresses,
        pages: LayerPages,
    ) -> torch.Tensor:
        """Streams of this layer [rows, streams, hidden] FP32.

        Args:
            previous_bundle: [rows, streams, hidden] FP32 of position p, before any head.
            embedding: [rows, hidden] FP32 of the token at p + 1.
        """
        rows, streams, _ = previous_bundle.shape
        embedding = rms_norm(embedding, self._embedding_norm, self._epsilon)
        # Each stream is normed and projected on its own.
        stream_rows = rms_norm(previous_bundle, self._stream_norm, self._epsilon).flatten(0, 1)
        if self._int8:
            embedded = self._embedding_int8(*quantize_rows(embedding))
            projected = self._stream_int8(*quantize_rows(stream_rows))
        else:
            embedded = linear(embedding, self._embedding_weight)
            projected = linear(stream_rows, self._stream_weight)
        bundle = embedded[:, None] + projected.unflatten(0, (rows, streams))
        return self.block(bundle, token_ids, addresses, pages)

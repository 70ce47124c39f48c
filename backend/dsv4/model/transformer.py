"""The DeepSeek V4 network: rows in, residual streams and logits out."""

from __future__ import annotations

import torch

from dsv4.checkpoint.weights import ModelWeights
from dsv4.config.model_config import CSA_RATIO, ModelConfig, Numerics
from dsv4.errors import ConfigurationError
from dsv4.model.addressing import AddressBuilder
from dsv4.model.attention import LayerPages
from dsv4.model.batch import ForwardBatch
from dsv4.model.block import Block
from dsv4.model.cache_pools import CachePools
from dsv4.model.hyper_connection import HyperConnectionHead
from dsv4.model.mtp import PredictionLayer
from dsv4.model.ops import linear, rms_norm, round_bf16
from dsv4.model.rope import compress_table, main_table


class DeepseekV4Model:
    """All layers, the prediction layer and the head of one checkpoint.

    Rows of a call may belong to any number of sequences. Methods are meant to run under `torch.inference_mode`.

    Args:
        weights: loaded with the same numerics.

    Attributes:
        blocks: the hidden layers.
        prediction_layers: the multi-token-prediction layers, none or one.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, *, numerics: Numerics, device: str | torch.device = "cpu"
    ) -> None:
        """Raises ConfigurationError when the checkpoint has more than one prediction layer, or on mixed numerics."""
        if weights.numerics != numerics:
            raise ConfigurationError(f"numerics: weights were loaded for {weights.numerics}, not {numerics}")
        if config.num_nextn_predict_layers > 1:
            raise ConfigurationError(
                f"num_nextn_predict_layers is {config.num_nextn_predict_layers}; at most one layer is supported"
            )
        self.config = config
        self.numerics = numerics
        self.device = torch.device(device)
        main = main_table(config, numerics=numerics, device=self.device)
        compress = compress_table(config, numerics=numerics, device=self.device)
        ratios = {config.layer_ratio(layer) for layer in range(config.num_hidden_layers)}
        self._addresses = AddressBuilder(config, ratios, main, compress)
        self._mtp_addresses = AddressBuilder(config, {config.mtp_ratio}, main, compress)

        self._embedding = weights.stored("embed.weight").to(self.device)
        self.blocks = [
            Block(
                config,
                weights,
                f"layers.{layer}.",
                ratio=config.layer_ratio(layer),
                hashed=config.is_hash_layer(layer),
                device=self.device,
            )
            for layer in range(config.num_hidden_layers)
        ]
        self._head_connection = HyperConnectionHead(config, weights, "", self.device)
        self._norm = weights.vector("norm.weight").to(self.device)
        self._head = weights.matrix("head.weight").to(self.device)
        self.prediction_layers = [
            PredictionLayer(config, weights, index, self.device) for index in range(config.num_nextn_predict_layers)
        ]

    def forward(self, batch: ForwardBatch, pools: CachePools) -> torch.Tensor:
        """Run all hidden layers and write their caches.

        Returns:
            residual streams [rows, hc_mult, hidden] FP32, before the head.

        Raises:
            ValueError: a row's position has no block.
        """
        addresses = self._addresses.build(batch, pools)
        embedded = self._embed(batch.token_ids)
        bundle = embedded[:, None].repeat(1, self.config.hc_mult, 1)
        for layer, block in enumerate(self.blocks):
            bundle = block(bundle, batch.token_ids, addresses, self._pages(pools, layer))
        return bundle

    def logits(self, bundle: torch.Tensor) -> torch.Tensor:
        """[rows, hc_mult, hidden] -> [rows, vocab] FP32."""
        return self._project(self._head_connection(bundle), self._norm)

    def forward_mtp(self, previous_bundle: torch.Tensor, batch: ForwardBatch, pools: CachePools) -> torch.Tensor:
        """Run the prediction layer and write its window.

        Args:
            previous_bundle: [rows, hc_mult, hidden] FP32 of positions p: from `forward`, or from this method when it
                drafts on its own drafts.
            batch: positions p and the tokens at p + 1.

        Returns:
            its own streams [rows, hc_mult, hidden] FP32.
        """
        addresses = self._mtp_addresses.build(batch, pools)
        embedded = self._embed(batch.token_ids)
        pages = LayerPages(pools.mtp_pages[0])
        return self.prediction_layers[0](previous_bundle, embedded, batch.token_ids, addresses, pages)

    def mtp_logits(self, bundle: torch.Tensor) -> torch.Tensor:
        """Logits for position p + 2 from the streams of `forward_mtp`: [rows, hc_mult, hidden] -> [rows, vocab]."""
        layer = self.prediction_layers[0]
        return self._project(layer.head(bundle), layer.norm)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding.index_select(0, token_ids).float()

    def _project(self, hidden: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        if self.numerics == "float":
            return linear(rms_norm(hidden, norm, self.config.rms_norm_eps), self._head)
        hidden = round_bf16(rms_norm(round_bf16(hidden), norm, self.config.rms_norm_eps))
        return linear(hidden, self._head)

    def _pages(self, pools: CachePools, layer: int) -> LayerPages:
        (window,) = pools.pages["ori"][layer]
        ratio = self.config.layer_ratio(layer)
        if ratio == 0:
            return LayerPages(window)
        if ratio == CSA_RATIO:
            return LayerPages(
                window,
                entries=pools.pages["cmp_c4"][layer][0],
                state=pools.pages["csa_state"][layer][0],
                inner_state=pools.pages["csa_inner_state"][layer][0],
                index_keys=pools.pages["idx"][layer],
            )
        return LayerPages(window, entries=pools.pages["cmp_c128"][layer][0], state=pools.pages["hca_state"][layer][0])

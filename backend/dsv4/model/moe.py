"""Mixture of experts: routing by token id or by score, one shared expert, many routed ones."""

from __future__ import annotations

from typing import Protocol

import torch

from dsv4.checkpoint.weights import ModelWeights
from dsv4.config.model_config import ModelConfig
from dsv4.model.int8_linear import Int8Linear
from dsv4.model.ops import inverse_rms, linear, quantize_rows, round_bf16, softplus, swiglu
from dsv4.model.routed_experts import LocalFloatExperts, LocalInt8Experts


class RoutedExperts(Protocol):
    """Runs the routed experts of one layer, wherever their weights are."""

    def __call__(
        self,
        x: torch.Tensor,
        row_scale: torch.Tensor | None,
        expert_ids: torch.Tensor,
        route_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Weighted output of every route.

        Args:
            x: [rows, hidden]; FP32 integers in -127..127 with `row_scale` [rows, 1], or FP32 values without.
            expert_ids: [rows, experts per token] int64.
            route_weights: [rows, experts per token] FP32.

        Returns:
            [rows, experts per token, hidden] FP32, the route weight applied, in W8A8 rounded to BF16.
        """
        ...


class Router:
    """Chooses the experts of each row and their weights.

    Args:
        prefix: tensor name prefix ending in `gate.`.
        hashed: choose by token id; the weights come from the scores all the same.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, prefix: str, *, hashed: bool, device: torch.device
    ) -> None:
        self._experts_per_token = config.num_experts_per_tok
        self._scaling = config.routed_scaling_factor
        self._weight = weights.matrix(f"{prefix}weight").to(device)
        self._table: torch.Tensor | None = None
        if hashed:
            self._table = weights.stored(f"{prefix}tid2eid").long().to(device)
        else:
            self._bias = weights.vector(f"{prefix}bias").to(device)

    def __call__(
        self, x: torch.Tensor, factor: torch.Tensor | None, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids [rows, k] int64 and route weights [rows, k] FP32.

        Args:
            x: [rows, hidden] FP32.
            factor: [rows, 1], multiplies the scores' logits when the RMS factor of x is still to be applied.
        """
        logits = linear(x, self._weight)
        if factor is not None:
            logits.mul_(factor)
        scores = softplus(logits).sqrt_()
        if self._table is not None:
            expert_ids = self._table[token_ids]
        else:
            # The bias steers the choice only. A stable sort takes the lowest expert among equals.
            order = (scores + self._bias).sort(dim=1, descending=True, stable=True).indices
            expert_ids = order[:, : self._experts_per_token]
        chosen = scores.gather(1, expert_ids)
        return expert_ids, chosen / chosen.sum(dim=1, keepdim=True) * self._scaling


class MixtureOfExperts:
    """The feed-forward half of a block, its norm included.

    Args:
        prefix: tensor name prefix of the block.
        hashed: routing by token id.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, prefix: str, *, hashed: bool, device: torch.device
    ) -> None:
        self._int8 = weights.numerics == "w8a8"
        self._epsilon = config.rms_norm_eps
        self._limit = config.swiglu_limit
        self._norm = weights.vector(f"{prefix}ffn_norm.weight").to(device)
        self._router = Router(config, weights, f"{prefix}ffn.gate.", hashed=hashed, device=device)
        shared = f"{prefix}ffn.shared_experts."
        self.routed_experts: RoutedExperts
        if self._int8:
            gate_up = [weights.quantized(f"{shared}{name}.weight") for name in ("w1", "w3")]
            self._shared_in = Int8Linear(
                torch.cat([values for values, _ in gate_up]), torch.cat([scale for _, scale in gate_up]), device
            )
            self._shared_out = Int8Linear(*weights.quantized(f"{shared}w2.weight"), device)
            self.routed_experts = LocalInt8Experts(config, weights, f"{prefix}ffn.experts.", device)
        else:
            gate_up_weights = [weights.matrix(f"{shared}{name}.weight") for name in ("w1", "w3")]
            self._shared_in_weight = torch.cat(gate_up_weights).to(device)
            self._shared_out_weight = weights.matrix(f"{shared}w2.weight").to(device)
            self.routed_experts = LocalFloatExperts(config, weights, f"{prefix}ffn.experts.", device)

    def __call__(self, u: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """u [rows, hidden] FP32, the half-block's input before its norm -> [rows, hidden] FP32."""
        return self._in_int8(u, token_ids) if self._int8 else self._in_float(u, token_ids)

    def _in_float(self, u: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        x = u * inverse_rms(u, self._epsilon) * self._norm
        expert_ids, route_weights = self._router(x, None, token_ids)
        routes = self.routed_experts(x, None, expert_ids, route_weights)
        shared = linear(swiglu(linear(x, self._shared_in_weight), self._limit), self._shared_out_weight)
        return shared + routes.sum(dim=1)

    def _in_int8(self, u: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The RMS factor is a scalar per row, so it joins the row scale: `u * norm` is quantised without it."""
        x = u * self._norm
        factor = inverse_rms(u, self._epsilon)
        expert_ids, route_weights = self._router(x, factor, token_ids)
        values, scale = quantize_rows(x)
        row_scale = scale * factor
        routes = self.routed_experts(values, row_scale, expert_ids, route_weights)
        hidden, hidden_scale = quantize_rows(swiglu(self._shared_in(values, row_scale), self._limit))
        total = round_bf16(self._shared_out(hidden, hidden_scale))
        for route in routes.unbind(dim=1):
            total += route
        return round_bf16(total)

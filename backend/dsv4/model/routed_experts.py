"""Routed experts whose weights are all in this process.

Routes are sorted by expert, so that few products serve many routes. INT8 products are exact, so neither the order nor
the way they are computed changes a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4.checkpoint.weights import ModelWeights
from dsv4.config.model_config import ModelConfig
from dsv4.model.int8_linear import has_fast_integer_matmul, integer_matmul
from dsv4.model.ops import quantize_rows, round_bf16, swiglu

COMPILED_ROUTES_PER_EXPERT = 4
"""With fewer routes than this for each expert a compiled loop over routes beats one library call for each expert."""


@dataclass(frozen=True)
class RoutesByExpert:
    """Routes of one call in expert order.

    Attributes:
        order: [routes] int64, positions in the flattened (row, choice) order.
        experts: [routes] int64, ascending.
        counts: [experts] int64.
    """

    order: torch.Tensor
    experts: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def sort(cls, expert_ids: torch.Tensor, num_experts: int) -> RoutesByExpert:
        """expert_ids [rows, k]. Routes of one expert keep their (row, choice) order."""
        experts, order = expert_ids.flatten().sort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
        counts.scatter_add_(0, experts, torch.ones_like(experts))
        return cls(order, experts, counts)

    def padded_slots(self) -> tuple[torch.Tensor, int]:
        """Slot of each sorted route in an [experts, capacity] layout, and the capacity."""
        capacity = int(self.counts.max())
        first = self.counts.cumsum(0) - self.counts
        place = torch.arange(self.experts.shape[0], device=self.experts.device) - first[self.experts]
        return self.experts * capacity + place, capacity


class LocalFloatExperts:
    """Dequantised experts.

    Args:
        prefix: tensor name prefix ending in `experts.`.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, prefix: str, device: torch.device) -> None:
        self._limit = config.swiglu_limit
        self._num_experts = config.n_routed_experts

        def stack(*names: str) -> torch.Tensor:
            return torch.stack(
                [
                    torch.cat([weights.matrix(f"{prefix}{expert}.{name}.weight") for name in names])
                    for expert in range(config.n_routed_experts)
                ]
            ).to(device)

        self._weight_in = stack("w1", "w3")  # [experts, 2 * intermediate, hidden]
        self._weight_out = stack("w2")  # [experts, hidden, intermediate]

    def __call__(
        self,
        x: torch.Tensor,
        row_scale: torch.Tensor | None,
        expert_ids: torch.Tensor,
        route_weights: torch.Tensor,
    ) -> torch.Tensor:
        """See `dsv4.model.moe.RoutedExperts`."""
        assert row_scale is None
        routes = RoutesByExpert.sort(expert_ids, self._num_experts)
        slots, capacity = routes.padded_slots()
        padded = x.new_zeros(self._num_experts * capacity, x.shape[1])
        padded[slots] = x[routes.order // expert_ids.shape[1]]
        hidden = torch.bmm(padded.unflatten(0, (-1, capacity)), self._weight_in.transpose(1, 2))
        outputs = torch.bmm(swiglu(hidden, self._limit), self._weight_out.transpose(1, 2)).flatten(0, 1)
        result = torch.empty(routes.order.shape[0], x.shape[1], device=x.device)
        result[routes.order] = outputs[slots]
        return result.unflatten(0, expert_ids.shape) * route_weights[:, :, None]


class LocalInt8Experts:
    """INT8 experts.

    Args:
        prefix: tensor name prefix ending in `experts.`.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, prefix: str, device: torch.device) -> None:
        self._limit = config.swiglu_limit
        self._num_experts = config.n_routed_experts
        self._compiled = device.type == "cpu"
        self._fast = has_fast_integer_matmul(device)

        def stack(*names: str) -> tuple[torch.Tensor, torch.Tensor]:
            pairs = [
                [weights.quantized(f"{prefix}{expert}.{name}.weight") for name in names]
                for expert in range(config.n_routed_experts)
            ]
            values = torch.stack([torch.cat([value for value, _ in pair]) for pair in pairs])
            scales = torch.stack([torch.cat([scale for _, scale in pair]) for pair in pairs])
            return values.to(device), scales.to(device)

        self._values_in, self._scale_in = stack("w1", "w3")  # [experts, 2 * intermediate, hidden]
        self._values_out, self._scale_out = stack("w2")  # [experts, hidden, intermediate]

    def __call__(
        self,
        x: torch.Tensor,
        row_scale: torch.Tensor | None,
        expert_ids: torch.Tensor,
        route_weights: torch.Tensor,
    ) -> torch.Tensor:
        """See `dsv4.model.moe.RoutedExperts`."""
        assert row_scale is not None
        routes = RoutesByExpert.sort(expert_ids, self._num_experts)
        rows = routes.order // expert_ids.shape[1]
        hidden = self._products(x.index_select(0, rows), self._values_in, routes)
        hidden.mul_(row_scale.index_select(0, rows)).mul_(self._scale_in.index_select(0, routes.experts))
        values, scale = quantize_rows(swiglu(hidden, self._limit))
        outputs = self._products(values, self._values_out, routes)
        weight = route_weights.flatten()[routes.order, None]
        outputs.mul_(scale * weight).mul_(self._scale_out.index_select(0, routes.experts))
        result = torch.empty_like(outputs)
        result.index_copy_(0, routes.order, round_bf16(outputs))
        return result.unflatten(0, expert_ids.shape)

    def _products(self, x: torch.Tensor, weight: torch.Tensor, routes: RoutesByExpert) -> torch.Tensor:
        """Exact products of rows sorted by expert: x [routes, in], weight [experts, out, in] -> [routes, out] FP32.

        Both ways give the same bits.
        """
        if self._compiled and x.shape[0] < COMPILED_ROUTES_PER_EXPERT * self._num_experts:
            from dsv4.model.cpu_kernels import grouped_int8_products

            return grouped_int8_products(x.to(torch.int8), weight, routes.experts)
        counts = routes.counts.tolist()
        products = [
            integer_matmul(part, weight[expert], fast=self._fast)
            for expert, part in enumerate(x.split(counts))
            if counts[expert]
        ]
        return torch.cat(products)

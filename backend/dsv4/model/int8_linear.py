"""INT8 x INT8 products with exact integer accumulation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

EXACT_FP32_DEPTH = 1024
"""Longest INT8 dot product whose every partial sum FP32 holds exactly: 1024 * 127 * 127 < 2^24."""

CUDA_MIN_ROWS = 32
"""`torch._int_mm` on CUDA refuses fewer than 17 rows."""


def has_fast_integer_matmul(device: torch.device) -> bool:
    """Whether `torch._int_mm` is both exact and quick there.

    On a CPU that takes VNNI instructions; without them the library saturates or falls back to scalar loops.
    """
    if device.type == "cuda":
        return True
    return device.type == "cpu" and bool(torch.cpu._is_vnni_supported())


def integer_matmul(x: torch.Tensor, weight: torch.Tensor, *, fast: bool) -> torch.Tensor:
    """x [rows, in] (FP32 integers in -127..127) with INT8 weight [out, in] -> FP32 [rows, out].

    The sum is exact; only its conversion to FP32 rounds, once, above 2^24.
    """
    if not fast:
        return _integer_matmul_in_fp32(x, weight)
    rows = x.shape[0]
    x = x.to(torch.int8)
    if x.device.type == "cuda" and rows < CUDA_MIN_ROWS:
        x = F.pad(x, (0, 0, 0, CUDA_MIN_ROWS - rows))
    return torch._int_mm(x, weight.t())[:rows].float()


def _integer_matmul_in_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    depth = x.shape[1]
    if depth <= EXACT_FP32_DEPTH:
        return F.linear(x, weight.float())
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for begin in range(0, depth, EXACT_FP32_DEPTH):
        end = begin + EXACT_FP32_DEPTH
        total += F.linear(x[:, begin:end], weight[:, begin:end].float()).to(torch.int32)
    return total.float()


class Int8Linear:
    """A weight of INT8 rows: `y = float(q . w) * row_scale * channel_scale`."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, device: torch.device) -> None:
        """weight [out, in] INT8, scale [out] FP32."""
        self.weight = weight.to(device)
        self.scale = scale.to(device)
        self._fast = has_fast_integer_matmul(device)

    def __call__(self, x: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
        """x [rows, in] FP32 integers and row_scale [rows, 1] of `quantize_rows` -> FP32 [rows, out]."""
        return integer_matmul(x, self.weight, fast=self._fast).mul_(row_scale).mul_(self.scale)

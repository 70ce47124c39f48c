"""Row-wise arithmetic that the parts of the network share.

Every function treats rows independently, and a row's result does not depend on how many rows there are: batch company
must not change a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

INT8_LIMIT = 127.0
SMALLEST_ROW_MAXIMUM = 1e-4

COMPILED_ELEMENTS = 1 << 16
"""Up to this size a compiled loop beats a handful of tensor operations on a CPU."""

MATMUL_ROWS = 16
"""FP32 products of fewer rows are padded to this many: below it BLAS libraries switch to kernels that sum in another
order (measured with MKL), which would make a row's result depend on its company."""


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """FP32 values rounded to what BF16 can hold."""
    return x.bfloat16().float()


def inverse_rms(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`1 / sqrt(mean(x^2) + epsilon)` over the last axis: [..., width] -> [..., 1] FP32."""
    return (x * x).mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last axis in FP32; without weight the plain quotient."""
    normed = x * inverse_rms(x, epsilon)
    return normed if weight is None else normed.mul_(weight)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric dynamic INT8 of each row over the last axis, rounding half to even.

    `m = 127 / max(max|x|, 1e-4)`, `q = round(x * m)`, `scale = 1 / m`: a multiplication by m, not a division by the
    scale, as in the PyPTO kernels; the two differ in rare ties.

    Returns:
        q [..., width] as FP32 holding integers in -127..127, and scale [..., 1] FP32.
    """
    if x.device.type == "cpu" and x.numel() <= COMPILED_ELEMENTS and x.is_contiguous():
        from dsv4.model import cpu_kernels

        return cpu_kernels.quantize_rows(x)
    return quantize_rows_with_tensors(x)


def quantize_rows_with_tensors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows` in tensor operations: the same bits."""
    largest = x.abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST_ROW_MAXIMUM)
    # `127.0 / largest` would be computed as reciprocal times 127, which rounds twice.
    multiplier = torch.div(largest.new_full((), INT8_LIMIT), largest)
    return (x * multiplier).round_(), multiplier.reciprocal()


def gather_rows(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """pool [pool rows, width] at slots [rows, keys] -> [rows, keys, width]."""
    return pool.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """FP32 product x [rows, in] with weight [out, in] -> [rows, out]."""
    rows = x.shape[0]
    if rows >= MATMUL_ROWS:
        return F.linear(x, weight)
    return F.linear(F.pad(x, (0, 0, 0, MATMUL_ROWS - rows)), weight)[:rows]


def batched_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """FP32 products x [groups, rows, in] with weight [groups, out, in] -> [groups, rows, out]."""
    rows = x.shape[1]
    if rows >= MATMUL_ROWS:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.bmm(F.pad(x, (0, 0, 0, MATMUL_ROWS - rows)), weight.transpose(1, 2))[:, :rows]


def swiglu(gate_and_up: torch.Tensor, limit: float) -> torch.Tensor:
    """`silu(min(gate, limit)) * clip(up, -limit, limit)` of [..., 2 * width] -> [..., width].

    The gate is clamped from above only, and before the activation.
    """
    gate, up = gate_and_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return sigmoid(gate).mul_(gate).mul_(up.clamp(-limit, limit))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`1 / (1 + exp(-x))`.

    Unlike `torch.sigmoid`, `silu` and `softplus`, whose CPU loops compute the last few elements of a tensor in another
    way than the others, so that a row's value would depend on how many rows follow it.
    """
    return x.neg().exp_().add_(1.0).reciprocal_()


def softplus(x: torch.Tensor) -> torch.Tensor:
    """`log(1 + exp(x))` without overflow; see `sigmoid` for why it is spelled out."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp_min(0.0))


def hadamard_matrix(size: int, *, device: torch.device) -> torch.Tensor:
    """Sylvester-Hadamard matrix [size, size] FP32 times `size^-1/2` rounded to BF16, so that it is orthonormal.

    Raises:
        ValueError: size is no power of two.
    """
    if size <= 0 or size & (size - 1):
        raise ValueError(f"a Hadamard matrix needs a power of two, not {size}")
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix * round_bf16(torch.tensor(size**-0.5, device=device))

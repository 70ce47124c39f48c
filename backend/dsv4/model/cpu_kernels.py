"""Compiled CPU loops for the two places where many tiny tensor operations dominate a decode step.

Both have a plain PyTorch form beside their callers, which other devices use and tests compare with. Importing this
module imports numba, so callers do it when they need it.
"""

from __future__ import annotations

import numba
import numpy as np
import torch


def sinkhorn_(mapping: torch.Tensor, iterations: int, epsilon: float) -> torch.Tensor:
    """In place on contiguous FP32 [rows, source, target]: see `HyperConnection`. Returns `mapping`."""
    _sinkhorn(mapping.numpy(), iterations, np.float32(epsilon))
    return mapping


def grouped_int8_products(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Exact INT8 products of each row with the weight of its expert.

    Args:
        x: [rows, in] INT8, contiguous.
        weight: [experts, out, in] INT8, contiguous.
        experts: [rows] int64.

    Returns:
        [rows, out] FP32; the INT32 sum is rounded once.
    """
    out = torch.empty(x.shape[0], weight.shape[1], dtype=torch.float32)
    _grouped_int8_products(x.numpy(), weight.numpy(), experts.numpy(), out.numpy())
    return out


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _sinkhorn(mapping: np.ndarray, iterations: int, epsilon: np.float32) -> None:
    rows, streams, _ = mapping.shape
    for row in range(rows):
        matrix = mapping[row]
        for source in range(streams):
            largest = matrix[source, 0]
            for target in range(1, streams):
                largest = max(largest, matrix[source, target])
            total = np.float32(0)
            for target in range(streams):
                matrix[source, target] = np.exp(matrix[source, target] - largest)
                total += matrix[source, target]
            for target in range(streams):
                matrix[source, target] = matrix[source, target] / total + epsilon
        for iteration in range(iterations):
            if iteration > 0:
                for source in range(streams):
                    total = np.float32(0)
                    for target in range(streams):
                        total += matrix[source, target]
                    total += epsilon
                    for target in range(streams):
                        matrix[source, target] /= total
            for target in range(streams):
                total = np.float32(0)
                for source in range(streams):
                    total += matrix[source, target]
                total += epsilon
                for source in range(streams):
                    matrix[source, target] /= total


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _grouped_int8_products(x: np.ndarray, weight: np.ndarray, experts: np.ndarray, out: np.ndarray) -> None:
    rows, depth = x.shape
    for row in range(rows):
        matrix = weight[experts[row]]
        values = x[row]
        for column in range(matrix.shape[0]):
            total = np.int32(0)
            # The casts keep numba from widening to INT64, so that the compiler finds the multiply-add of byte pairs.
            for index in range(depth):
                total = np.int32(total + np.int32(np.int32(values[index]) * np.int32(matrix[column, index])))
            out[row, column] = total

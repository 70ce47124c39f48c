"""Compiled CPU loops for the places where many tiny tensor operations dominate a decode step.

All have a plain PyTorch form beside their callers, which other devices use and tests compare with. Importing this
module imports numba, so callers do it when they need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
import torch

_Function = TypeVar("_Function", bound=Callable[..., None])


def _compiled(function: _Function) -> _Function:
    """Compile at the first call, and keep the result on disk where that is possible."""
    try:
        return cast(_Function, numba.njit(function, cache=True, error_model="numpy", nogil=True))
    except RuntimeError:  # numba found no directory that it may write
        return cast(_Function, numba.njit(function, error_model="numpy", nogil=True))


def split_mixes(
    mixes: torch.Tensor, streams: int, iterations: int, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `dsv4.model.hyper_connection.split_mixes`."""
    rows = mixes.shape[0]
    read_weights = torch.empty(rows, streams)
    write_weights = torch.empty(rows, streams)
    mapping = torch.empty(rows, streams, streams)
    _split_mixes(
        mixes.numpy(),
        iterations,
        np.float32(epsilon),
        read_weights.numpy(),
        write_weights.numpy(),
        mapping.numpy(),
    )
    return read_weights, write_weights, mapping


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `dsv4.model.ops.quantize_rows`; the same bits. x is contiguous."""
    values = torch.empty_like(x)
    scale = torch.empty(*x.shape[:-1], 1)
    width = x.shape[-1]
    _quantize_rows(x.view(-1, width).numpy(), values.view(-1, width).numpy(), scale.view(-1).numpy())
    return values, scale


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


@_compiled
def _split_mixes(
    mixes: np.ndarray,
    iterations: int,
    epsilon: np.float32,
    read_weights: np.ndarray,
    write_weights: np.ndarray,
    mapping: np.ndarray,
) -> None:
    one = np.float32(1)
    rows, streams = read_weights.shape
    for row in range(rows):
        for stream in range(streams):
            read_weights[row, stream] = one / (one + np.exp(-mixes[row, stream])) + epsilon
            write_weights[row, stream] = np.float32(2) / (one + np.exp(-mixes[row, streams + stream]))
        matrix = mapping[row]
        for source in range(streams):
            logits = mixes[row, (2 + source) * streams : (3 + source) * streams]
            largest = logits.max()
            total = np.float32(0)
            for target in range(streams):
                matrix[source, target] = np.exp(logits[target] - largest)
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


@_compiled
def _quantize_rows(x: np.ndarray, values: np.ndarray, scale: np.ndarray) -> None:
    rows, width = x.shape
    for row in range(rows):
        largest = np.float32(1e-4)
        for index in range(width):
            size = abs(x[row, index])
            # The second condition keeps a NaN, which must not vanish in a finite scale.
            if size > largest or size != size:
                largest = size
        multiplier = np.float32(127) / largest
        for index in range(width):
            values[row, index] = np.rint(x[row, index] * multiplier)
        scale[row] = np.float32(1) / multiplier


@_compiled
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

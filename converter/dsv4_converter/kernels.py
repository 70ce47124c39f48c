"""The kernel interface and the choice of its implementation."""

from __future__ import annotations

import importlib.util
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

COMPILE_THRESHOLD_BYTES = 128 << 20
"""Source size above which compiling the kernels (a few seconds) pays."""


class RowKernels(Protocol):
    """Functions of `dsv4_converter.numpy_kernels` and `dsv4_converter.numba_kernels`, documented in the former."""

    def mxfp4_to_int8(
        self,
        packed: NDArray[np.uint8],
        scales: NDArray[np.uint8],
        out: NDArray[np.int8],
        out_scales: NDArray[np.float32],
        exact: bool,
    ) -> tuple[int, int]: ...

    def fp8_to_int8(
        self,
        weights: NDArray[np.uint8],
        scales: NDArray[np.float32],
        first_row: int,
        out: NDArray[np.int8],
        out_scales: NDArray[np.float32],
        exact: bool,
    ) -> tuple[int, int]: ...

    def fp8_to_bf16(
        self, weights: NDArray[np.uint8], scales: NDArray[np.float32], first_row: int, out: NDArray[np.uint16]
    ) -> int: ...


def choose_kernels(source_bytes: int) -> RowKernels:
    """Compiled kernels for large checkpoints where Numba is installed, NumPy ones otherwise."""
    if source_bytes >= COMPILE_THRESHOLD_BYTES and importlib.util.find_spec("numba") is not None:
        from dsv4_converter import numba_kernels

        return numba_kernels
    from dsv4_converter import numpy_kernels

    return numpy_kernels

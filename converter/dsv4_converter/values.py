"""Checks of plain tensor values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BITS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}


def first_not_finite(content: NDArray[np.uint8], dtype: str) -> int:
    """Index of the first NaN or infinity among the floats in the bytes, -1 if there is none.

    Types other than BF16, F16, F32 and F64 have none.
    """
    if dtype not in _BITS:
        return -1
    unsigned, exponent = _BITS[dtype]
    mask = unsigned(exponent)
    found = (content.view(unsigned) & mask) == mask
    return int(found.argmax()) if found.any() else -1

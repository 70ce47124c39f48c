"""Row kernels in plain NumPy: the reference of the compiled ones, and faster than compiling for small checkpoints.

All work in place on chunks of whole rows and return the first bad row (or -1) instead of raising.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsv4_converter.tables import (
    E2M1_EXPONENT,
    E2M1_MANTISSA,
    ERROR_LANES,
    INT8_MAX,
    LEAST_NEAREST_EXPONENT,
    LEAST_NEAREST_MAXIMUM,
    LEAST_ROW_EXPONENT,
    LEAST_SCALE_EXPONENT,
    RTN_FLOOR,
    STEP_MAX,
    STEP_MIN,
    e4m3_values,
    mxfp4_tables,
)

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def mxfp4_to_int8(
    packed: Bytes, scales: Bytes, out: NDArray[np.int8], out_scales: Floats, exact: bool
) -> tuple[int, int]:
    """Convert packed MXFP4 rows to INT8 rows with one scale each.

    Args:
        packed: [rows, columns / 2] bytes, low nibble = even column.
        scales: [rows, columns / 32] E8M0 bytes.
        out: [rows, columns], written.
        out_scales: [rows], written.
        exact: take the power-of-two scale where it loses nothing or less; else always round to nearest.

    Returns:
        the first row with a NaN scale or a weight beyond float32 (-1 if none), and how many rows lost nothing under a
        power-of-two scale (0 unless ``exact``).
    """
    tables = mxfp4_tables()
    rows, groups = scales.shape
    magnitude = np.maximum(packed & 7, (packed >> 4) & 7).reshape(rows, groups, 16).max(axis=2)
    key = 2 * (scales.astype(np.int32) + E2M1_EXPONENT[magnitude]) + E2M1_MANTISSA[magnitude]
    row_key = np.where(magnitude > 0, key, -4).max(axis=1)
    exponent, mantissa = row_key >> 1, row_key & 1
    bad = (scales == 0xFF).any(axis=1) | (exponent - 127 > 127)
    if bad.any():
        return int(bad.argmax()), 0
    zero = row_key == -4
    with np.errstate(under="ignore"):
        maximum = np.ldexp(np.float32(1) + np.float32(0.5) * mantissa.astype(np.float32), exponent - 127)
    maximum = np.where(zero, 0, maximum).astype(np.float32)
    base = np.maximum(exponent, LEAST_ROW_EXPONENT) if exact else exponent
    step = np.clip(scales.astype(np.int32) - base[:, None] + 5, STEP_MIN, STEP_MAX) - STEP_MIN
    # [rows, groups, 1] + [rows, groups, 16] -> flat index into [steps, 256]
    index = step[:, :, None] * 256 + packed.reshape(rows, groups, 16)
    pairs = out.view(np.uint16).reshape(rows, groups, 16)
    per_mantissa = tables.power_pairs.size
    lossless = zero.copy()
    if exact:
        pairs[...] = tables.power_pairs.reshape(-1)[index]
        out_scales[:] = np.ldexp(np.float32(1), base - 133)
        present = np.bitwise_or.reduce(_PRESENT_MAGNITUDES[packed].reshape(rows, groups, 16), axis=2)
        lossless |= ~(present & tables.lossy_magnitudes[step]).any(axis=1)
        nearest = np.flatnonzero(~lossless & (exponent >= LEAST_NEAREST_EXPONENT))
        if nearest.size:
            chosen = index[nearest]
            power_error = _sequential_sum(tables.power_error.reshape(-1)[chosen])
            offset = mantissa[nearest, None, None] * per_mantissa
            nearest_error = _sequential_sum(tables.nearest_error.reshape(-1)[chosen + offset])
            nearest = nearest[power_error >= nearest_error]
    else:
        nearest = np.arange(rows)
    if nearest.size:
        chosen = index[nearest] + mantissa[nearest, None, None] * per_mantissa
        pairs[nearest] = tables.nearest_pairs.reshape(-1)[chosen]
        out_scales[nearest] = maximum[nearest] / INT8_MAX
    if not exact:
        _round_below_floor(packed, scales, maximum, out, out_scales)
    out_scales[zero] = RTN_FLOOR / INT8_MAX
    out[zero] = 0
    return -1, int(lossless.sum()) if exact else 0


def _round_below_floor(
    packed: Bytes, scales: Bytes, maximum: Floats, out: NDArray[np.int8], out_scales: Floats
) -> None:
    """Rows whose maximum is below the floor use the floor's scale, so the tables do not hold for them."""
    scale = RTN_FLOOR / INT8_MAX
    for row in np.flatnonzero(maximum < RTN_FLOOR):
        weights = dequantize_mxfp4(packed[row : row + 1], scales[row : row + 1])[0]
        out[row] = np.clip(np.rint(weights / scale), -127, 127)
        out_scales[row] = scale


_PRESENT_MAGNITUDES = np.array([(1 << (byte & 7)) | (1 << ((byte >> 4) & 7)) for byte in range(256)], np.uint8)
_SIGNED_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def dequantize_mxfp4(packed: Bytes, scales: Bytes) -> Floats:
    """[rows, columns / 2] packed bytes and [rows, columns / 32] E8M0 bytes -> [rows, columns] float32 weights."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    exponents = np.repeat(scales.astype(np.int32) - 127, 32, axis=1)
    weights: Floats = np.ldexp(_SIGNED_E2M1[nibbles], exponents)
    return weights


def _sequential_sum(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of each row in column order, which is the order the compiled kernels use."""
    total: NDArray[np.float64] = np.cumsum(values.reshape(len(values), -1), axis=1)[:, -1]
    return total


def dequantize_fp8(weights: Bytes, scales: Floats, first_row: int) -> Floats:
    """[rows, columns] E4M3 bytes and [row blocks, column blocks] float32 scales -> [rows, columns] float32 weights.

    Row r of the chunk belongs to scale row ``(first_row + r) // 128``.
    """
    rows, columns = weights.shape
    row_scales = scales[(first_row + np.arange(rows)) // 128]
    with np.errstate(over="ignore", invalid="ignore"):
        values: Floats = e4m3_values()[weights] * np.repeat(row_scales, 128, axis=1)[:, :columns]
    return values


def fp8_to_int8(
    weights: Bytes, scales: Floats, first_row: int, out: NDArray[np.int8], out_scales: Floats, exact: bool
) -> tuple[int, int]:
    """Convert F8_E4M3 rows with 128x128 block scales to INT8 rows with one scale each.

    Args:
        weights: [rows, columns] bytes.
        scales: [row blocks, column blocks] float32 of the whole tensor.
        first_row: row of the tensor that the chunk starts with.
        out: [rows, columns], written.
        out_scales: [rows], written.
        exact: as in `mxfp4_to_int8`.

    Returns:
        as `mxfp4_to_int8`.
    """
    values = dequantize_fp8(weights, scales, first_row)
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        return int((~finite).argmax()), 0
    maximum = np.abs(values).max(axis=1)
    floor = LEAST_NEAREST_MAXIMUM if exact else RTN_FLOOR
    nearest_scale = np.maximum(maximum, floor) / INT8_MAX
    codes = np.clip(np.rint(values / nearest_scale[:, None]), -127, 127)
    out[...] = codes
    out_scales[:] = nearest_scale
    if not exact:
        return -1, 0
    fraction, exponent = np.frexp(maximum)
    exponent = exponent - 7 + (np.rint(fraction * np.float32(128)) > 127)
    power_scale = np.ldexp(np.float32(1), np.maximum(exponent, LEAST_SCALE_EXPONENT))
    power_codes = np.clip(np.rint(values / power_scale[:, None]), -127, 127)
    power_error = _squared_error(values, power_codes, power_scale)
    tiny = maximum < LEAST_NEAREST_MAXIMUM
    better = tiny | (power_error < _squared_error(values, codes, nearest_scale))
    out[better] = power_codes[better]
    out_scales[better] = power_scale[better]
    zero = maximum == 0
    out_scales[zero] = RTN_FLOOR / INT8_MAX
    return -1, int((zero | (power_error == 0)).sum())


def _squared_error(values: Floats, codes: Floats, scale: Floats) -> NDArray[np.float64]:
    difference = values.astype(np.float64) - codes.astype(np.float64) * scale.astype(np.float64)[:, None]
    rows, columns = difference.shape
    squares = np.zeros((rows, -(-columns // ERROR_LANES) * ERROR_LANES))
    squares[:, :columns] = difference * difference
    return _sequential_sum(np.cumsum(squares.reshape(rows, -1, ERROR_LANES), axis=1)[:, -1])


def fp8_to_bf16(weights: Bytes, scales: Floats, first_row: int, out: NDArray[np.uint16]) -> int:
    """Dequantize F8_E4M3 rows to BF16 (round to nearest even).

    Args:
        weights, scales, first_row: as in `fp8_to_int8`.
        out: [rows, columns] BF16 bits, written.

    Returns:
        the first row with a NaN or a weight beyond BF16, -1 if none.
    """
    bits = dequantize_fp8(weights, scales, first_row).view(np.uint32)
    not_finite = (bits & np.uint32(0x7F800000)) == 0x7F800000
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    not_finite |= (rounded & np.uint32(0x7F80)) == 0x7F80
    bad = not_finite.any(axis=1)
    if bad.any():
        return int(bad.argmax())
    out[...] = rounded
    return -1

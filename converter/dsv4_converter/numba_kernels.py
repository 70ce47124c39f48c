"""Row kernels compiled by Numba. They compute exactly what `dsv4_converter.numpy_kernels` computes.

Nothing is compiled at import; the first call of a kernel compiles it (a few seconds for all). The machine code is kept
on disk only where the user names a directory by NUMBA_CACHE_DIR. All kernels release the GIL.
"""

from __future__ import annotations

import os

import numba
import numpy as np
from numpy.typing import NDArray

from dsv4_converter import tables
from dsv4_converter.tables import STEP_MAX, STEP_MIN

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_compile = numba.njit(nogil=True, cache=bool(os.environ.get("NUMBA_CACHE_DIR")), error_model="numpy")

_RTN_FLOOR = tables.RTN_FLOOR
_INT8_MAX = tables.INT8_MAX
_ZERO_ROW_SCALE = np.float32(tables.RTN_FLOOR / tables.INT8_MAX)
_LEAST_ROW_EXPONENT = tables.LEAST_ROW_EXPONENT
_LEAST_RTN_MAXIMUM = tables.LEAST_RTN_MAXIMUM
_LEAST_SCALE_EXPONENT = tables.LEAST_SCALE_EXPONENT
# Adding and subtracting it rounds a float32 of magnitude below 2^22 to the nearest even integer.
_ROUND = np.float32(12582912.0)


def mxfp4_to_int8(
    packed: Bytes, scales: Bytes, out: NDArray[np.int8], out_scales: Floats, exact: bool
) -> tuple[int, int]:
    """See `dsv4_converter.numpy_kernels.mxfp4_to_int8`."""
    table = tables.mxfp4_tables()
    pairs = out.view(np.uint16)
    if exact:
        bad, lossless = _mxfp4_exact(
            packed,
            scales,
            pairs,
            out_scales,
            table.nearest,
            table.power,
            table.inexact,
            table.nearest_error,
            table.power_error,
            _power_of_two(),
        )
        return int(bad), int(lossless)
    return int(_mxfp4_nearest(packed, scales, pairs, out_scales, table.nearest, _signed_e2m1(), _power_of_two())), 0


def _power_of_two() -> Floats:
    """[512] float32, ``2^(index - 255)`` (0 and infinity at the ends): ldexp as a table."""
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(np.float64(1), np.arange(512) - 255).astype(np.float32)


def _signed_e2m1() -> Floats:
    return np.concatenate([tables.E2M1_VALUES, -tables.E2M1_VALUES]).astype(np.float32)


@_compile
def _row_key(packed, scales, row, groups):  # type: ignore[no-untyped-def]
    """2 E + m of the row maximum; -4 for a row of zeros, a huge number for a NaN scale."""
    key = np.int32(-4)
    for group in range(groups):
        magnitude = np.uint8(0)
        for index in range(16):
            byte = packed[row, 16 * group + index]
            magnitude = max(magnitude, max(byte & np.uint8(7), (byte >> np.uint8(4)) & np.uint8(7)))
        scale = np.int32(scales[row, group])
        if scale == 255:
            return 1 << 20
        if magnitude > 0:
            # Codes 1..7 are 2^-1, 2^0, 1.5*2^0, 2^1, 1.5*2^1, 2^2, 1.5*2^2.
            key = max(key, 2 * (scale - 1) + (np.int32(0) if magnitude == 1 else np.int32(magnitude)))
    return key


@_compile
def _mxfp4_nearest(packed, scales, pairs, out_scales, nearest, values, power_of_two):  # type: ignore[no-untyped-def]
    rows, groups = scales.shape
    for row in range(rows):
        key = _row_key(packed, scales, row, groups)
        exponent, mantissa = key >> 1, key & 1
        if exponent > 254:
            return row
        if key == -4:
            out_scales[row] = _ZERO_ROW_SCALE
            for index in range(16 * groups):
                pairs[row, index] = 0
            continue
        maximum = (np.float32(1) + np.float32(0.5) * np.float32(mantissa)) * power_of_two[exponent - 127 + 255]
        if maximum < _RTN_FLOOR:
            out_scales[row] = _ZERO_ROW_SCALE
            for group in range(groups):
                unit = power_of_two[np.int32(scales[row, group]) - 127 + 255]
                for index in range(16 * group, 16 * group + 16):
                    byte = packed[row, index]
                    low = np.uint16(np.uint8(np.int8(np.rint(values[byte & 15] * unit / _ZERO_ROW_SCALE))))
                    high = np.uint16(np.uint8(np.int8(np.rint(values[byte >> 4] * unit / _ZERO_ROW_SCALE))))
                    pairs[row, index] = low | (high << np.uint16(8))
            continue
        out_scales[row] = maximum / _INT8_MAX
        for group in range(groups):
            step = min(max(np.int32(scales[row, group]) - exponent + 5, STEP_MIN), STEP_MAX) - STEP_MIN
            for index in range(16 * group, 16 * group + 16):
                pairs[row, index] = nearest[mantissa, step, packed[row, index]]
    return -1


@_compile
def _mxfp4_exact(  # type: ignore[no-untyped-def]
    packed, scales, pairs, out_scales, nearest, power, inexact, nearest_error, power_error, power_of_two
):
    rows, groups = scales.shape
    lossless = 0
    for row in range(rows):
        key = _row_key(packed, scales, row, groups)
        exponent, mantissa = key >> 1, key & 1
        if exponent > 254:
            return row, 0
        if key == -4:
            out_scales[row] = _ZERO_ROW_SCALE
            for index in range(16 * groups):
                pairs[row, index] = 0
            lossless += 1
            continue
        base = max(exponent, _LEAST_ROW_EXPONENT)
        out_scales[row] = power_of_two[base - 133 + 255]
        loses = False
        for group in range(groups):
            step = min(max(np.int32(scales[row, group]) - base + 5, STEP_MIN), STEP_MAX) - STEP_MIN
            for index in range(16 * group, 16 * group + 16):
                pairs[row, index] = power[step, packed[row, index]]
            if step < -STEP_MIN:
                for index in range(16 * group, 16 * group + 16):
                    loses |= inexact[step, packed[row, index]]
        if not loses:
            lossless += 1
            continue
        if exponent < _LEAST_ROW_EXPONENT:
            continue
        own_error, other_error = 0.0, 0.0
        for group in range(groups):
            step = min(max(np.int32(scales[row, group]) - base + 5, STEP_MIN), STEP_MAX) - STEP_MIN
            for index in range(16 * group, 16 * group + 16):
                own_error += power_error[step, packed[row, index]]
                other_error += nearest_error[mantissa, step, packed[row, index]]
        if own_error < other_error:
            continue
        maximum = (np.float32(1) + np.float32(0.5) * np.float32(mantissa)) * power_of_two[exponent - 127 + 255]
        out_scales[row] = maximum / _INT8_MAX
        for group in range(groups):
            step = min(max(np.int32(scales[row, group]) - base + 5, STEP_MIN), STEP_MAX) - STEP_MIN
            for index in range(16 * group, 16 * group + 16):
                pairs[row, index] = nearest[mantissa, step, packed[row, index]]
    return -1, lossless


def fp8_to_int8(
    weights: Bytes, scales: Floats, first_row: int, out: NDArray[np.int8], out_scales: Floats, exact: bool
) -> tuple[int, int]:
    """See `dsv4_converter.numpy_kernels.fp8_to_int8`."""
    bad, lossless = _fp8_to_int8(
        weights, scales, first_row, out, out_scales, exact, tables.e4m3_values(), _power_of_two()
    )
    return int(bad), int(lossless)


@_compile
def _dequantize_row(weights, scales, first_row, row, e4m3, values):  # type: ignore[no-untyped-def]
    """Fill ``values`` with one float32 row; returns its largest magnitude, NaN or infinity if any weight is."""
    columns = weights.shape[1]
    scale_row = (first_row + row) // 128
    largest = np.float32(0)
    for block in range(scales.shape[1]):
        scale = scales[scale_row, block]
        begin = 128 * block
        end = min(begin + 128, columns)
        code = np.uint8(0)
        for column in range(begin, end):
            code = max(code, weights[row, column] & np.uint8(0x7F))
        here = e4m3[code] * scale
        # E4M3 has one NaN code above all others and no infinity, so the largest magnitude tells of both.
        if not np.isfinite(here):
            return np.float32(np.inf)
        largest = max(largest, here)
        for column in range(begin, end):
            values[column] = e4m3[weights[row, column]] * scale
    return largest


@_compile
def _fp8_to_int8(weights, scales, first_row, out, out_scales, exact, e4m3, power_of_two):  # type: ignore[no-untyped-def]
    rows, columns = weights.shape
    values = np.empty(columns, np.float32)
    lossless = 0
    for row in range(rows):
        maximum = _dequantize_row(weights, scales, first_row, row, e4m3, values)
        if not np.isfinite(maximum):
            return row, 0
        if maximum == 0:
            out[row, :] = 0
            out_scales[row] = _ZERO_ROW_SCALE
            lossless += 1 if exact else 0
            continue
        nearest_scale = max(maximum, _LEAST_RTN_MAXIMUM if exact else _RTN_FLOOR) / _INT8_MAX
        scale = nearest_scale
        if exact:
            exponent = np.int32(0)
            # frexp: maximum = fraction * 2^exponent with fraction in [0.5, 1)
            fraction = maximum
            bits = np.float32(maximum).view(np.uint32)
            if bits < np.uint32(0x00800000):
                fraction = maximum * np.float32(16777216.0)
                bits = np.float32(fraction).view(np.uint32)
                exponent -= np.int32(24)
            exponent += np.int32(bits >> np.uint32(23)) - np.int32(126)
            top = fraction * power_of_two[255 - (np.int32(bits >> np.uint32(23)) - np.int32(126)) + 7]
            exponent -= np.int32(7)
            if (top + _ROUND) - _ROUND > _INT8_MAX:
                exponent += np.int32(1)
            power_scale = power_of_two[max(exponent, np.int32(_LEAST_SCALE_EXPONENT)) + 255]
            power_error, nearest_error = 0.0, 0.0
            for column in range(columns):
                value = values[column]
                difference = np.float64(value) - np.float64((value / power_scale + _ROUND) - _ROUND) * np.float64(
                    power_scale
                )
                power_error += difference * difference
                difference = np.float64(value) - np.float64((value / nearest_scale + _ROUND) - _ROUND) * np.float64(
                    nearest_scale
                )
                nearest_error += difference * difference
            if power_error < nearest_error or maximum < _LEAST_RTN_MAXIMUM:
                scale = power_scale
            if power_error == 0:
                lossless += 1
        out_scales[row] = scale
        for column in range(columns):
            rounded = (values[column] / scale + _ROUND) - _ROUND
            out[row, column] = np.int8(min(max(rounded, np.float32(-127)), np.float32(127)))
    return -1, lossless


def fp8_to_bf16(weights: Bytes, scales: Floats, first_row: int, out: NDArray[np.uint16]) -> int:
    """See `dsv4_converter.numpy_kernels.fp8_to_bf16`."""
    return int(_fp8_to_bf16(weights, scales, first_row, out, tables.e4m3_values()))


@_compile
def _fp8_to_bf16(weights, scales, first_row, out, e4m3):  # type: ignore[no-untyped-def]
    rows, columns = weights.shape
    values = np.empty(columns, np.float32)
    bits = values.view(np.uint32)
    for row in range(rows):
        maximum = _dequantize_row(weights, scales, first_row, row, e4m3, values)
        if not np.isfinite(maximum):
            return row
        largest = np.uint32(0)
        for column in range(columns):
            value = bits[column]
            rounded = (value + np.uint32(0x7FFF) + ((value >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            largest = max(largest, rounded & np.uint32(0x7FFF))
            out[row, column] = np.uint16(rounded)
        if largest >= np.uint32(0x7F80):
            return row
    return -1


def first_not_finite_16(bits: NDArray[np.uint16], exponent_mask: int) -> int:
    """See `dsv4_converter.numpy_kernels.first_not_finite_16`."""
    return int(_first_all_ones(bits, np.uint16(exponent_mask)))


def first_not_finite_32(bits: NDArray[np.uint32]) -> int:
    """See `dsv4_converter.numpy_kernels.first_not_finite_32`."""
    return int(_first_all_ones(bits, np.uint32(0x7F800000)))


@_compile
def _first_all_ones(bits, mask):  # type: ignore[no-untyped-def]
    count = len(bits)
    for begin in range(0, count, 4096):
        end = min(begin + 4096, count)
        found = False
        for index in range(begin, end):
            found |= (bits[index] & mask) == mask
        if found:
            for index in range(begin, end):
                if (bits[index] & mask) == mask:
                    return index
    return -1

"""Row kernels compiled by Numba. They compute exactly what `dsv4_converter.numpy_kernels` computes.

Nothing is compiled at import; the first call of a kernel compiles it (a few seconds for all). The machine code is kept
on disk only where the user names a directory by NUMBA_CACHE_DIR. All kernels release the GIL.
"""

from __future__ import annotations

import os
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from dsv4_converter import tables
from dsv4_converter.group_kernels import GROUP_BYTES, make_group_kernels
from dsv4_converter.tables import ERROR_LANES, STEP_MAX, STEP_MIN

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Numba's type stubs do not know all of its options.
_njit: Any = numba.njit
_compile = _njit(nogil=True, error_model="numpy", cache=bool(os.environ.get("NUMBA_CACHE_DIR")))
# Called from compiled code only: leaving the Python entry points out saves compile time.
_inner = _njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

_group_mask, _convert_group = make_group_kernels()

_RTN_FLOOR = tables.RTN_FLOOR
_INT8_MAX = tables.INT8_MAX
_ZERO_ROW_SCALE = np.float32(tables.RTN_FLOOR / tables.INT8_MAX)
_LEAST_ROW_EXPONENT = tables.LEAST_ROW_EXPONENT
_LEAST_NEAREST_EXPONENT = tables.LEAST_NEAREST_EXPONENT
_LEAST_NEAREST_MAXIMUM = tables.LEAST_NEAREST_MAXIMUM
_LEAST_SCALE_EXPONENT = tables.LEAST_SCALE_EXPONENT
# Adding and subtracting it rounds a float32 of magnitude below 2^22 to the nearest even integer.
_ROUND = np.float32(12582912.0)
_E4M3_UNIT = np.float32(2.0**-9)


def mxfp4_to_int8(
    packed: Bytes, scales: Bytes, out: NDArray[np.int8], out_scales: Floats, exact: bool
) -> tuple[int, int]:
    """See `dsv4_converter.numpy_kernels.mxfp4_to_int8`."""
    table = tables.mxfp4_tables()
    flat_packed, flat_out = packed.reshape(-1), out.reshape(-1)
    if exact:
        bad, lossless = _mxfp4_exact(
            flat_packed,
            scales,
            flat_out,
            out_scales,
            table.nearest_codes,
            table.power_codes.reshape(-1),
            table.lossy_magnitudes,
            table.nearest_error,
            table.power_error,
            _power_of_two(),
        )
        return int(bad), int(lossless)
    bad = _mxfp4_nearest(
        flat_packed, scales, flat_out, out_scales, table.nearest_codes, _signed_e2m1(), _power_of_two()
    )
    return int(bad), 0


def _power_of_two() -> Floats:
    """[512] float32, ``2^(index - 255)`` (0 and infinity at the ends): ldexp as a table."""
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(np.float64(1), np.arange(512) - 255).astype(np.float32)


def _signed_e2m1() -> Floats:
    return np.concatenate([tables.E2M1_VALUES, -tables.E2M1_VALUES]).astype(np.float32)


@_inner
def _row_key(packed, scales, row, masks):  # type: ignore[no-untyped-def]
    """2 E + m of the row maximum; -4 for a row of zeros, a huge number for a NaN scale. Fills the groups' masks."""
    groups = scales.shape[1]
    key = np.int64(-4)
    for group in range(groups):
        mask = _group_mask(packed, GROUP_BYTES * (row * groups + group))
        masks[group] = mask
        scale = np.int64(scales[row, group])
        if scale == 255:
            return np.int64(1 << 20)
        # Codes 1..7 are 2^-1, 2^0, 1.5*2^0, 2^1, 1.5*2^1, 2^2, 1.5*2^2.
        own = np.int64(-4)
        if mask >= 4:
            magnitude = np.int64(2)
            while (mask >> (magnitude + 1)) != 0:
                magnitude += 1
            own = 2 * (scale - 1) + magnitude
        elif mask >= 2:
            own = 2 * (scale - 1)
        key = max(key, own)
    return key


@_inner
def _step(scale, exponent):  # type: ignore[no-untyped-def]
    return min(max(np.int64(scale) - exponent + 5, STEP_MIN), STEP_MAX) - STEP_MIN


@_inner
def _convert_row(packed, scales, row, base, codes, out):  # type: ignore[no-untyped-def]
    groups = scales.shape[1]
    for group in range(groups):
        offset = GROUP_BYTES * (row * groups + group)
        _convert_group(packed, offset, codes, 16 * _step(scales[row, group], base), out, 2 * offset)


@_inner
def _zero_row(scales, row, out, out_scales):  # type: ignore[no-untyped-def]
    columns = 32 * scales.shape[1]
    out[row * columns : (row + 1) * columns] = 0
    out_scales[row] = _ZERO_ROW_SCALE


@_inner
def _row_maximum(key, power_of_two):  # type: ignore[no-untyped-def]
    return (np.float32(1) + np.float32(0.5) * np.float32(key & 1)) * power_of_two[(key >> 1) - 127 + 255]


@_compile
def _mxfp4_nearest(packed, scales, out, out_scales, nearest, values, power_of_two):  # type: ignore[no-untyped-def]
    rows, groups = scales.shape
    masks = np.empty(groups, np.uint8)
    for row in range(rows):
        key = _row_key(packed, scales, row, masks)
        exponent = key >> 1
        if exponent > 254:
            return row
        if key == -4:
            _zero_row(scales, row, out, out_scales)
            continue
        maximum = _row_maximum(key, power_of_two)
        if maximum >= _RTN_FLOOR:
            out_scales[row] = maximum / _INT8_MAX
            _convert_row(packed, scales, row, exponent, nearest[key & 1].reshape(-1), out)
            continue
        out_scales[row] = _ZERO_ROW_SCALE
        for group in range(groups):
            unit = power_of_two[np.int64(scales[row, group]) - 127 + 255]
            begin = GROUP_BYTES * (row * groups + group)
            for index in range(begin, begin + GROUP_BYTES):
                byte = packed[index]
                out[2 * index] = np.int8(np.rint(values[byte & 15] * unit / _ZERO_ROW_SCALE))
                out[2 * index + 1] = np.int8(np.rint(values[byte >> 4] * unit / _ZERO_ROW_SCALE))
    return -1


@_inner
def _power_is_better(packed, scales, row, base, power_error, nearest_error):  # type: ignore[no-untyped-def]
    """Compare the squared errors of a row, summed in column order."""
    groups = scales.shape[1]
    own, other = 0.0, 0.0
    for group in range(groups):
        step = _step(scales[row, group], base)
        begin = GROUP_BYTES * (row * groups + group)
        for index in range(begin, begin + GROUP_BYTES):
            own += power_error[step, packed[index]]
            other += nearest_error[step, packed[index]]
    return own < other


@_compile
def _mxfp4_exact(  # type: ignore[no-untyped-def]
    packed, scales, out, out_scales, nearest, power, lossy_magnitudes, nearest_error, power_error, power_of_two
):
    rows, groups = scales.shape
    masks = np.empty(groups, np.uint8)
    lossless = 0
    for row in range(rows):
        key = _row_key(packed, scales, row, masks)
        exponent = key >> 1
        if exponent > 254:
            return row, 0
        if key == -4:
            _zero_row(scales, row, out, out_scales)
            lossless += 1
            continue
        base = max(exponent, _LEAST_ROW_EXPONENT)
        lost = 0
        for group in range(groups):
            lost |= masks[group] & lossy_magnitudes[_step(scales[row, group], base)]
        if lost == 0:
            lossless += 1
        elif exponent >= _LEAST_NEAREST_EXPONENT and not _power_is_better(
            packed, scales, row, base, power_error, nearest_error[key & 1]
        ):
            out_scales[row] = _row_maximum(key, power_of_two) / _INT8_MAX
            _convert_row(packed, scales, row, base, nearest[key & 1].reshape(-1), out)
            continue
        out_scales[row] = power_of_two[base - 133 + 255]
        _convert_row(packed, scales, row, base, power, out)
    return -1, lossless


def fp8_to_int8(
    weights: Bytes, scales: Floats, first_row: int, out: NDArray[np.int8], out_scales: Floats, exact: bool
) -> tuple[int, int]:
    """See `dsv4_converter.numpy_kernels.fp8_to_int8`."""
    bad, lossless = _fp8_to_int8(
        weights, scales, first_row, out, out_scales, exact, _power_of_two(), tables.e4m3_values()
    )
    return int(bad), int(lossless)


@_inner
def _decode_block(codes, scale, values, e4m3):  # type: ignore[no-untyped-def]
    """Fill ``values`` with the float32 weights of at most 128 columns; returns their largest magnitude."""
    largest = np.uint8(0)
    for column in range(len(codes)):
        byte = codes[column]
        magnitude = np.int32(byte & np.uint8(0x7F))
        largest = max(largest, np.uint8(magnitude))
        # Every E4M3 number is an integer below 2^18 times 2^-9. (Going by way of float32 subnormals would be shorter
        # and, for weights that need it, a hundred times slower.)
        exponent = np.int32(magnitude >> np.int32(3))
        significand = np.int32((magnitude & np.int32(7)) | (np.int32(8) if exponent > 0 else np.int32(0)))
        integer = np.int32(significand << max(exponent - np.int32(1), np.int32(0)))
        unit = -_E4M3_UNIT if byte >= np.uint8(0x80) else _E4M3_UNIT
        values[column] = np.float32(integer) * unit * scale
    # E4M3 has one NaN code above all others and no infinity, so the largest magnitude tells of both.
    return e4m3[largest] * scale


@_inner
def _dequantize_row(codes, scales, values, e4m3):  # type: ignore[no-untyped-def]
    """Fill ``values`` with one float32 row; returns its largest magnitude, infinity if any weight is not finite."""
    largest = np.float32(0)
    for block in range(len(scales)):
        columns = slice(128 * block, min(128 * block + 128, len(codes)))
        here = _decode_block(codes[columns], scales[block], values[columns], e4m3)
        if not np.isfinite(here):
            return np.float32(np.inf)
        largest = max(largest, here)
    return largest


@_inner
def _round_row(values, scale, out):  # type: ignore[no-untyped-def]
    """INT8 codes of a row. No clipping: no scale in use takes a weight beyond 127."""
    for column in range(len(values)):
        out[column] = np.int8(np.int32((values[column] / scale + _ROUND) - _ROUND))


@_inner
def _power_scale_exponent(maximum):  # type: ignore[no-untyped-def]
    """Exponent of the least power-of-two scale under which ``maximum`` does not round to more than 127."""
    exponent = np.int64(-127 - 6)
    bits = np.float32(maximum).view(np.uint32)
    if bits < np.uint32(0x00800000):
        bits = np.float32(maximum * np.float32(16777216.0)).view(np.uint32)
        exponent -= 24
    exponent += np.int64(bits >> np.uint32(23))
    # The significand times 64 rounds to 128 from 127.5 on.
    if (bits & np.uint32(0x007FFFFF)) >= np.uint32(0x007F0000):
        exponent += 1
    return max(exponent, np.int64(_LEAST_SCALE_EXPONENT))


@_inner
def _squared_error(values, scale, squares):  # type: ignore[no-untyped-def]
    """Squared error of rounding a row under a scale, summed in eight (ERROR_LANES) interleaved lanes."""
    wide = np.float64(scale)
    for column in range(len(values)):
        value = values[column]
        difference = np.float64(value) - np.float64((value / scale + _ROUND) - _ROUND) * wide
        squares[column] = difference * difference
    squares[len(values) :] = 0.0
    a, b, c, d, e, f, g, h = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    lines = squares.reshape(-1, 8)
    for index in range(len(lines)):
        line = lines[index]
        a += line[0]
        b += line[1]
        c += line[2]
        d += line[3]
        e += line[4]
        f += line[5]
        g += line[6]
        h += line[7]
    return ((((((a + b) + c) + d) + e) + f) + g) + h


@_compile
def _fp8_to_int8(weights, scales, first_row, out, out_scales, exact, power_of_two, e4m3):  # type: ignore[no-untyped-def]
    rows, columns = weights.shape
    values = np.empty(columns, np.float32)
    squares = np.empty(-(-columns // ERROR_LANES) * ERROR_LANES, np.float64)
    lossless = 0
    for row in range(rows):
        maximum = _dequantize_row(weights[row], scales[(first_row + row) // 128], values, e4m3)
        if not np.isfinite(maximum):
            return row, 0
        if maximum == 0:
            out[row, :] = 0
            out_scales[row] = _ZERO_ROW_SCALE
            lossless += 1 if exact else 0
            continue
        scale = max(maximum, _LEAST_NEAREST_MAXIMUM if exact else _RTN_FLOOR) / _INT8_MAX
        if exact:
            power_scale = power_of_two[_power_scale_exponent(maximum) + 255]
            power_error = _squared_error(values, power_scale, squares)
            if maximum < _LEAST_NEAREST_MAXIMUM or power_error < _squared_error(values, scale, squares):
                scale = power_scale
            if power_error == 0:
                lossless += 1
        out_scales[row] = scale
        _round_row(values, scale, out[row])
    return -1, lossless


def fp8_to_bf16(weights: Bytes, scales: Floats, first_row: int, out: NDArray[np.uint16]) -> int:
    """See `dsv4_converter.numpy_kernels.fp8_to_bf16`."""
    return int(_fp8_to_bf16(weights, scales, first_row, out, tables.e4m3_values()))


@_inner
def _round_to_bf16(bits, out):  # type: ignore[no-untyped-def]
    """Round to nearest even; returns the largest magnitude as BF16 bits."""
    largest = np.uint16(0)
    for column in range(len(bits)):
        value = bits[column]
        rounded = np.uint16(np.uint32(value + np.uint32(0x7FFF) + ((value >> np.uint32(16)) & np.uint32(1))) >> 16)
        largest = max(largest, np.uint16(rounded & np.uint16(0x7FFF)))
        out[column] = rounded
    return largest


@_compile
def _fp8_to_bf16(weights, scales, first_row, out, e4m3):  # type: ignore[no-untyped-def]
    rows, columns = weights.shape
    values = np.empty(columns, np.float32)
    bits = values.view(np.uint32)
    for row in range(rows):
        maximum = _dequantize_row(weights[row], scales[(first_row + row) // 128], values, e4m3)
        if not np.isfinite(maximum):
            return row
        if _round_to_bf16(bits, out[row]) >= 0x7F80:
            return row
    return -1

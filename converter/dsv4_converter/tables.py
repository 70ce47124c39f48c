"""Look-up tables of the conversion. Both kernel backends use the same ones, so they agree bit for bit.

An MXFP4 row is a set of weights ``c * 2^(g - 128)``: c = twice the E2M1 magnitude, an integer of {0, 1, 2, 3, 4, 6,
8, 12}, and g the E8M0 byte of the weight's group of 32. The row maximum is ``(1 + m/2) * 2^(E - 127)``, m in {0, 1}.
Scaling by a power of two changes nothing in float32 (no value here is subnormal after the division), so the INT8 code
of a weight depends only on its nibble, on m and on the group's *step* ``g - E + 5``:

* step 0 is the group whose unit equals the power-of-two scale ``2^(E - 133)``, under which the row maximum is 64 or 96;
* below STEP_MIN every weight of the group rounds to zero, above STEP_MAX only zeros can occur.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

STEP_MIN = -6
STEP_MAX = 7

RTN_FLOOR = np.float32(1e-4)
"""Smallest row maximum that the round-to-nearest rule scales by."""

INT8_MAX = np.float32(127)

LEAST_SCALE_EXPONENT = -126
"""Power-of-two scales stay normal float32 numbers: engines may flush subnormal ones to zero."""

LEAST_ROW_EXPONENT = 7
"""Biased row exponent E below which ``2^(E - 133)`` would be subnormal."""

LEAST_NEAREST_EXPONENT = 8
LEAST_NEAREST_MAXIMUM = np.float32(2.0**-119)
"""Biased exponent and value of the least row maximum whose 127th part is a normal float32 number."""

ERROR_LANES = 8
"""Squared errors of FP8 rows are summed column c in lane c mod 8, then over the lanes: an order that vectorizes."""

# Magnitudes of E2M1 codes 0..7 as value = (1 + MANTISSA / 2) * 2^EXPONENT; code 0 is zero.
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
E2M1_EXPONENT = np.array([0, -1, 0, 0, 1, 1, 2, 2], np.int32)
E2M1_MANTISSA = np.array([0, 0, 0, 1, 0, 1, 0, 1], np.int32)


@dataclass(frozen=True)
class Mxfp4Tables:
    """Tables indexed by ``step - STEP_MIN`` and by nibble or packed byte (low nibble = even column).

    Attributes:
        nearest_codes: [2, steps, 16] int8 codes of nibbles under the round-to-nearest scale, by m.
        power_codes: [steps, 16] int8 codes of nibbles under the power-of-two scale.
        lossy_magnitudes: [steps] uint8, bit set of the magnitudes 0..7 that ``power_codes`` does not hold exactly.
        nearest_pairs: [2, steps, 256] uint16, ``nearest_codes`` for both nibbles of a byte.
        power_pairs: [steps, 256] uint16, likewise.
        nearest_error: [2, steps, 256] float64, squared error of both weights of a byte, unit ``4^(E - 127)``.
        power_error: [steps, 256] float64, likewise.
    """

    nearest_codes: NDArray[np.int8]
    power_codes: NDArray[np.int8]
    lossy_magnitudes: NDArray[np.uint8]
    nearest_pairs: NDArray[np.uint16]
    power_pairs: NDArray[np.uint16]
    nearest_error: NDArray[np.float64]
    power_error: NDArray[np.float64]


@lru_cache(maxsize=1)
def mxfp4_tables() -> Mxfp4Tables:
    """Build the tables with the float32 formula of the round-to-nearest rule itself."""
    steps = np.arange(STEP_MIN, STEP_MAX + 1)
    signed = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
    # [steps, 16] weights of a row whose biased exponent E is 127.
    weights = 2 * signed * np.exp2(steps[:, None] - 6.0)
    power_codes = np.clip(np.rint(weights * 64), -127, 127)
    power_loss = weights - power_codes / 64
    nearest_codes, nearest_loss = [], []
    for maximum in (1.0, 1.5):
        scale = np.float32(maximum) / INT8_MAX
        codes = np.clip(np.rint(weights.astype(np.float32) / scale), -127, 127)
        nearest_codes.append(codes)
        nearest_loss.append(weights - codes.astype(np.float64) * np.float64(scale))
    # Steps below the first are looked up there. Both rules round such weights to zero, so leaving their equal errors
    # out does not change which rule is better.
    power_error, nearest_error = power_loss**2, np.stack(nearest_loss) ** 2
    power_error[0] = 0
    nearest_error[:, 0] = 0
    low, high = np.arange(256) & 15, np.arange(256) >> 4
    return Mxfp4Tables(
        nearest_codes=np.stack(nearest_codes).astype(np.int8),
        power_codes=power_codes.astype(np.int8),
        lossy_magnitudes=np.packbits(power_loss[:, :8] != 0, axis=1, bitorder="little")[:, 0],
        nearest_pairs=_pair(np.stack(nearest_codes), low, high),
        power_pairs=_pair(power_codes, low, high),
        nearest_error=np.ascontiguousarray(nearest_error[..., low] + nearest_error[..., high]),
        power_error=np.ascontiguousarray(power_error[:, low] + power_error[:, high]),
    )


def _pair(codes: NDArray[np.float64], low: NDArray[np.int64], high: NDArray[np.int64]) -> NDArray[np.uint16]:
    """[..., 16] codes -> [..., 256] pairs, laid out so that the even column comes first in memory."""
    pairs = np.stack([codes[..., low], codes[..., high]], axis=-1).astype(np.int8)
    return np.ascontiguousarray(pairs).view(np.uint16)[..., 0]


@lru_cache(maxsize=1)
def e4m3_values() -> NDArray[np.float32]:
    """[256] float32 value of every F8_E4M3 byte; 0x7F and 0xFF are NaN."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0))
    values = np.where(byte & 0x80, -magnitude, magnitude)
    values[(byte & 0x7F) == 0x7F] = np.nan
    return values.astype(np.float32)


def e8m0_values(scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """float32 value ``2^(byte - 127)`` of F8_E8M0 bytes; 0xFF is NaN."""
    values = np.ldexp(np.float64(1), scales.astype(np.int32) - 127)
    values[scales == 0xFF] = np.nan
    return values.astype(np.float32)

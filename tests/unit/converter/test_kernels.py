"""The row kernels against the definition of the formats and of the rules, in both implementations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dsv4_converter import group_kernels, numba_kernels, numpy_kernels
from dsv4_converter.tables import e4m3_values, e8m0_values
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.converter.checkpoints import dequantize, round_to_nearest

KERNELS = [numpy_kernels, numba_kernels]
RNG = np.random.default_rng(7)


def random_mxfp4(
    rows: int, columns: int, scales: tuple[int, int], seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    packed[rng.random(packed.shape) < 0.3] = 0
    packed[0] = 0
    packed[1:3] &= 0x99  # only the least magnitude
    return packed, rng.integers(*scales, (rows, columns // 32)).astype(np.uint8)


def mxfp4_weights(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> torch.Tensor:
    return dequantize(("I8", packed.shape, packed.tobytes()), ("F8_E8M0", scales.shape, scales.tobytes()))


def fp8_weights(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> torch.Tensor:
    return dequantize(("F8_E4M3", codes.shape, codes.tobytes()), ("F32", scales.shape, scales.tobytes()))


def run_mxfp4(kernels: Any, packed: NDArray[np.uint8], scales: NDArray[np.uint8], exact: bool) -> Any:
    out = np.empty((len(packed), 2 * packed.shape[1]), np.int8)
    out_scales = np.empty(len(packed), np.float32)
    result = kernels.mxfp4_to_int8(packed, scales, out, out_scales, exact)
    return result, torch.from_numpy(out), torch.from_numpy(out_scales)


def run_fp8(kernels: Any, codes: NDArray[np.uint8], scales: NDArray[np.float32], exact: bool) -> Any:
    """In two chunks, the second not starting at a block boundary."""
    out = np.empty(codes.shape, np.int8)
    out_scales = np.empty(len(codes), np.float32)
    lossless = 0
    for rows in (slice(0, 70), slice(70, len(codes))):
        bad, count = kernels.fp8_to_int8(codes[rows], scales, rows.start, out[rows], out_scales[rows], exact)
        assert bad == -1
        lossless += count
    return lossless, torch.from_numpy(out), torch.from_numpy(out_scales)


def squared_errors(weights: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weights.double() - codes.double() * scales.double()[:, None]).square().sum(dim=1)


# Around a released checkpoint's range; a wide span; below the rule's floor; subnormal; near the top of float32.
MXFP4_SCALES = [(118, 122), (105, 125), (90, 118), (0, 12), (240, 252)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("scales", MXFP4_SCALES)
def test_mxfp4_rtn_is_bit_identical_to_the_rule(kernels: Any, scales: tuple[int, int]) -> None:
    packed, scale_bytes = random_mxfp4(64, 224, scales, seed=1)
    (bad, _), codes, row_scales = run_mxfp4(kernels, packed, scale_bytes, exact=False)
    expected_codes, expected_scales = round_to_nearest(mxfp4_weights(packed, scale_bytes))
    assert bad == -1
    assert torch.equal(codes, expected_codes)
    assert torch.equal(row_scales, expected_scales)


@pytest.mark.parametrize("scales", MXFP4_SCALES)
def test_mxfp4_exact_is_never_worse_and_both_kernels_agree(scales: tuple[int, int]) -> None:
    packed, scale_bytes = random_mxfp4(64, 224, scales, seed=2)
    (bad, lossless), codes, row_scales = run_mxfp4(numpy_kernels, packed, scale_bytes, exact=True)
    other_result, other_codes, other_scales = run_mxfp4(numba_kernels, packed, scale_bytes, exact=True)
    assert ((bad, lossless), bad) == (other_result, -1)
    assert torch.equal(codes, other_codes)
    assert torch.equal(row_scales, other_scales)
    weights = mxfp4_weights(packed, scale_bytes)
    errors = squared_errors(weights, codes, row_scales)
    assert (errors <= squared_errors(weights, *round_to_nearest(weights))).all()
    assert lossless == int((errors == 0).sum())
    assert (row_scales >= 2.0**-126).all()


@settings(max_examples=150, deadline=None)
@given(
    top=st.integers(10, 240),
    steps=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    seed=st.integers(0, 2**32 - 1),
    even_only=st.booleans(),
)
def test_rows_within_the_span_lose_nothing(top: int, steps: list[int], seed: int, even_only: bool) -> None:
    """Group exponents that span at most three steps fit an INT8 row under a power-of-two scale, whatever the codes."""
    packed = np.random.default_rng(seed).integers(0, 256, (1, 48)).astype(np.uint8)
    if even_only:
        packed &= 0xEE
    scales = np.array([[top - step for step in steps]], np.uint8)
    weights = mxfp4_weights(packed, scales)
    (_, lossless), codes, row_scales = run_mxfp4(numpy_kernels, packed, scales, exact=True)
    error = squared_errors(weights, codes, row_scales).item()
    unit = 2.0 ** (top - max(steps) - 128)
    integers = weights.double() / unit
    largest = float(weights.abs().max())
    fits = largest == 0 or any(
        bool((integers / 2.0**shift == (integers / 2.0**shift).round()).all())
        and float(integers.abs().max()) / 2.0**shift <= 127
        for shift in range(-1, 12)
    )
    assert (error == 0) == fits == (lossless == 1)
    if max(steps) - min(steps) <= 3:
        assert error == 0
    assert error <= squared_errors(weights, *round_to_nearest(weights)).item()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("byte", [255, 254])
def test_mxfp4_scales_beyond_float32_name_the_row(kernels: Any, exact: bool, byte: int) -> None:
    packed, scales = random_mxfp4(8, 96, (118, 122), seed=3)
    scales[5, 1] = byte
    packed[5, 16:32] = 0x77
    (bad, _), _, _ = run_mxfp4(kernels, packed, scales, exact)
    assert bad == 5


@pytest.mark.parametrize("kernels", KERNELS)
def test_mxfp4_nan_scale_of_a_group_of_zeros_is_bad(kernels: Any) -> None:
    packed, scales = random_mxfp4(4, 96, (118, 122), seed=3)
    packed[2] = 0
    scales[2, 0] = 255
    assert run_mxfp4(kernels, packed, scales, exact=True)[0][0] == 2


FP8_CASES = [(columns, scales) for columns in (36, 160, 288, 384) for scales in ((118, 122), (0, 200), (0, 8))]


@pytest.mark.parametrize(("columns", "scales"), FP8_CASES)
def test_fp8_matches_the_rules(columns: int, scales: tuple[int, int]) -> None:
    codes = RNG.integers(0, 256, (150, columns)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 5
    codes[3] = 0x80
    block_scales = e8m0_values(RNG.integers(*scales, (2, -(-columns // 128))).astype(np.uint8))
    weights = fp8_weights(codes, block_scales)
    expected_codes, expected_scales = round_to_nearest(weights)
    for kernels in KERNELS:
        _, out, out_scales = run_fp8(kernels, codes, block_scales, exact=False)
        assert torch.equal(out, expected_codes)
        assert torch.equal(out_scales, expected_scales)
        bf16 = np.empty(codes.shape, np.uint16)
        assert kernels.fp8_to_bf16(codes, block_scales, 0, bf16) == -1
        assert torch.equal(torch.from_numpy(bf16.view(np.int16)), weights.bfloat16().view(torch.int16))
    exact = [run_fp8(kernels, codes, block_scales, exact=True) for kernels in KERNELS]
    assert exact[0][0] == exact[1][0]
    assert torch.equal(exact[0][1], exact[1][1])
    assert torch.equal(exact[0][2], exact[1][2])
    errors = squared_errors(weights, exact[0][1], exact[0][2])
    assert (errors <= squared_errors(weights, expected_codes, expected_scales)).all()
    assert exact[0][0] <= int((errors == 0).sum())


@pytest.mark.parametrize("kernels", KERNELS)
def test_fp8_nan_and_overflow_name_the_row(kernels: Any) -> None:
    codes = RNG.integers(0, 127, (140, 160)).astype(np.uint8)
    scales = np.full((2, 2), 2.0**-8, np.float32)
    out, out_scales = np.empty(codes.shape, np.int8), np.empty(140, np.float32)
    codes[133, 150] = 0xFF
    assert kernels.fp8_to_int8(codes, scales, 0, out, out_scales, True)[0] == 133
    assert kernels.fp8_to_bf16(codes, scales, 0, out.view(np.uint8).astype(np.uint16)) == 133
    codes[133, 150] = 0
    scales[1, 0] = 2.0**127
    assert kernels.fp8_to_int8(codes, scales, 0, out, out_scales, False)[0] == 128


def test_fp8_scales_need_not_be_powers_of_two() -> None:
    codes = RNG.integers(0, 127, (140, 160)).astype(np.uint8)
    scales = RNG.uniform(1e-4, 1e-2, (2, 2)).astype(np.float32)
    expected_codes, expected_scales = round_to_nearest(fp8_weights(codes, scales))
    for kernels in KERNELS:
        _, out, out_scales = run_fp8(kernels, codes, scales, exact=False)
        assert torch.equal(out, expected_codes)
        assert torch.equal(out_scales, expected_scales)


def test_format_tables_equal_torch() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8)
    e4m3 = every_byte.view(torch.float8_e4m3fn).float()
    assert torch.equal(torch.from_numpy(e4m3_values()).nan_to_num(777), e4m3.nan_to_num(777))
    e8m0 = every_byte.view(torch.float8_e8m0fnu).float()
    assert torch.equal(torch.from_numpy(e8m0_values(every_byte.numpy())).nan_to_num(777), e8m0.nan_to_num(777))


@pytest.mark.parametrize("shuffle", [True, False])
def test_group_operations_with_and_without_byte_shuffles(shuffle: bool) -> None:
    import numba

    if shuffle and group_kernels.shuffle_instruction() is None:
        pytest.skip("this processor has no byte shuffle")
    group_mask, convert_group = group_kernels.make_group_kernels(shuffle=shuffle)

    @numba.njit
    def run(packed, table, out):  # type: ignore[no-untyped-def]
        convert_group(packed, 16, table, 16, out, 32)
        return group_mask(packed, 16)

    packed = RNG.integers(0, 256, 48).astype(np.uint8)
    table = RNG.integers(-127, 128, 48).astype(np.int8)
    out = np.zeros(96, np.int8)
    mask = run(packed, table, out)
    nibbles = np.stack([packed[16:32] & 15, packed[16:32] >> 4], axis=-1).reshape(-1)
    assert np.array_equal(out[32:64], table[16:32][nibbles])
    assert not out[:32].any()
    assert not out[64:].any()
    assert mask == np.bitwise_or.reduce(1 << (nibbles & 7))

"""The two weight formats of the official checkpoint: exact encoding, and straight-through rounding for training."""

from typing import Any

import torch
from torch import Tensor

BLOCK, GROUP = 128, 32
FP8_MAX, FP4_MAX = 448.0, 6.0
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SMALLEST = 2.0**-126


def power_of_two_scale(largest: Tensor, limit: float) -> Tensor:
    """The smallest power of two that brings `largest` to at most `limit`."""
    return torch.exp2(torch.ceil(torch.log2(largest.clamp_min(SMALLEST * limit) / limit)))


def fp8_block_scales(weight: Tensor) -> Tensor:
    """Scales [ceil(out/128), ceil(in/128)] of a matrix [out, in]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    largest = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax((1, 3))
    return power_of_two_scale(largest, FP8_MAX)


def spread_blocks(scales: Tensor, shape: torch.Size) -> Tensor:
    """Block scales repeated to the shape of their matrix."""
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return spread[: shape[0], : shape[1]]


def encode_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as F8_E4M3 values and F8_E8M0 block scales."""
    scales = fp8_block_scales(weight)
    values = (weight / spread_blocks(scales, weight.shape)).to(torch.float8_e4m3fn)
    return values, scales.to(torch.float8_e8m0fnu)


def decode_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """The FP32 matrix of `encode_fp8`."""
    return values.float() * spread_blocks(scales.float(), values.shape)


def round_to_fp4_grid(scaled: Tensor) -> Tensor:
    """The nearest E2M1 value, halves to the even code, for |scaled| <= 6."""
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(scaled / step) * step


def encode_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [out, in] as packed codes I8 [out, in/2], low nibble first, and F8_E8M0 scales [out, in/32]."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scales = power_of_two_scale(groups.abs().amax(-1), FP4_MAX)
    rounded = round_to_fp4_grid(groups / scales[..., None]).flatten(-2)
    codes = torch.searchsorted(FP4_VALUES, rounded.abs()).to(torch.uint8)
    codes |= (rounded < 0).to(torch.uint8) << 3
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.contiguous().view(torch.int8), scales.to(torch.float8_e8m0fnu)


def decode_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """The FP32 matrix of `encode_mxfp4`."""
    raw = packed.view(torch.uint8)
    codes = torch.stack((raw & 15, raw >> 4), -1).flatten(-2).long()
    values = FP4_VALUES[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return (values.unflatten(-1, (-1, GROUP)) * scales.float()[..., None]).flatten(-2)


class StraightThrough(torch.autograd.Function):
    """Rounded value forward, the gradient of the identity backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def quantize_fp8_blocks(weight: Tensor) -> Tensor:
    """What `decode_fp8(encode_fp8(weight))` gives, with a straight-through gradient."""
    with torch.no_grad():
        rounded = decode_fp8(*encode_fp8(weight))
    return StraightThrough.apply(weight, rounded)


def quantize_mxfp4(weight: Tensor) -> Tensor:
    """What `decode_mxfp4(encode_mxfp4(weight))` gives, with a straight-through gradient."""
    with torch.no_grad():
        groups = weight.unflatten(-1, (-1, GROUP))
        scales = power_of_two_scale(groups.abs().amax(-1, keepdim=True), FP4_MAX)
        rounded = (round_to_fp4_grid(groups / scales) * scales).flatten(-2)
    return StraightThrough.apply(weight, rounded)

"""Values of quantised weights, and the INT8 form of a row.

Source checkpoints store FP8 E4M3 with one scale per 128 x 128 block, and routed experts as MXFP4: two E2M1 codes a
byte, low nibble first, one E8M0 scale per 32 columns.
"""

from __future__ import annotations

import torch

from dsv4.checkpoint.names import FP8_BLOCK, MXFP4_GROUP

INT8_LIMIT = 127.0
SMALLEST_ROW_MAXIMUM = 1e-4

# Value of each E2M1 code: sign bit, two exponent bits, one mantissa bit.
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 `weight` [out, in] times its block scale [ceil(out/128), ceil(in/128)] (E8M0 or F32) as FP32."""
    rows, columns = weight.shape
    scales = scale.float().repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return weight.float() * scales


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Packed codes [out, in / 2] (I8) times group scales [out, ceil(in/32)] (E8M0) as FP32 [out, in]."""
    codes = packed.view(torch.uint8)
    values = torch.tensor(_E2M1_VALUES, dtype=torch.float32, device=packed.device)
    pairs = torch.stack((values[(codes & 15).long()], values[(codes >> 4).long()]), dim=-1)
    unpacked = pairs.flatten(-2)
    return unpacked * scale.float().repeat_interleave(MXFP4_GROUP, 1)[:, : unpacked.shape[1]]


def dequantize_int8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """INT8 `weight` [out, in] times its row scale [out] as FP32."""
    return weight.float() * scale[:, None]


def quantize_rows_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round an FP32 `weight` [out, in] to INT8 with one scale a row: `max(|w|, 1e-4) / 127`, half to even."""
    scale = weight.abs().amax(dim=1).clamp_min(SMALLEST_ROW_MAXIMUM) / INT8_LIMIT
    quantized = torch.round(weight / scale[:, None]).clamp(-INT8_LIMIT, INT8_LIMIT)
    return quantized.to(torch.int8), scale

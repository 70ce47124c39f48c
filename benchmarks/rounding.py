"""Error of the two rounding modes on synthetic weights, alone and in a W8A8 matrix product.

    python benchmarks/rounding.py [--rows 1024] [--columns 2048] [--tokens 64]

Weights are drawn from a normal distribution and from Student's t with 5 and 3 degrees of freedom, quantized to MXFP4
and FP8 as releases are, and converted. Errors are RMS over RMS in percent. The product is an INT8 product with one
activation scale a token; "activations" is its error if the weights were exact.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dsv4_converter import numpy_kernels  # noqa: E402
from dsv4_converter.tables import e8m0_values  # noqa: E402

from tests.unit.converter.checkpoints import Tensor, dequantize, quantize_fp8, quantize_mxfp4  # noqa: E402


def draw(rows: int, columns: int, degrees: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=generator)
    if degrees:
        squares = sum(torch.randn(rows, columns, generator=generator).square() for _ in range(degrees))
        values /= (squares / degrees).sqrt()
    values *= 0.02 * torch.exp(0.15 * torch.randn(rows, 1, generator=generator))
    return values * torch.exp(0.15 * torch.randn(1, columns, generator=generator))


def converted(weight: Tensor, scale: Tensor, exact: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """INT8 rows, float32 scales, and the share of lossless rows."""
    raw = np.frombuffer(weight[2], np.uint8).reshape(weight[1])
    raw_scale = np.frombuffer(scale[2], np.uint8).reshape(scale[1])
    columns = 2 * raw.shape[1] if weight[0] == "I8" else raw.shape[1]
    codes, scales = np.empty((len(raw), columns), np.int8), np.empty(len(raw), np.float32)
    if weight[0] == "I8":
        _, lossless = numpy_kernels.mxfp4_to_int8(raw, raw_scale, codes, scales, exact)
    else:
        _, lossless = numpy_kernels.fp8_to_int8(raw, e8m0_values(raw_scale), 0, codes, scales, exact)
    return torch.from_numpy(codes), torch.from_numpy(scales), lossless / len(raw)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return 100 * ((found - exact).norm() / exact.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    activations = torch.randn(arguments.tokens, arguments.columns, generator=generator, dtype=torch.float64)
    steps = activations.abs().amax(dim=1, keepdim=True) / 127
    quantized = torch.round(activations / steps) * steps
    print(
        f"{'weights':<14}{'rtn':>7}{'exact':>7}{'lossless rows':>15}{'product rtn':>13}{'exact':>7}{'activations':>13}"
    )
    for name, quantize in (("MXFP4", quantize_mxfp4), ("FP8", quantize_fp8)):
        for degrees in (0, 5, 3):
            pair = quantize(draw(arguments.rows, arguments.columns, degrees, generator))
            weights = dequantize(*pair).double()
            errors, products, share = [], [], 0.0
            for exact in (False, True):
                codes, scales, share = converted(*pair, exact)
                values = codes.double() * scales.double()[:, None]
                errors.append(relative(values, weights))
                products.append(relative(quantized @ values.T, activations @ weights.T))
            alone = relative(quantized @ weights.T, activations @ weights.T)
            label = f"{name} {f't{degrees}' if degrees else 'normal'}"
            print(
                f"{label:<14}{errors[0]:>7.2f}{errors[1]:>7.2f}{100 * share:>14.1f}%"
                f"{products[0]:>13.2f}{products[1]:>7.2f}{alone:>13.2f}"
            )


if __name__ == "__main__":
    main()

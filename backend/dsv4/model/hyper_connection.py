"""Manifold-constrained hyper-connections: how a half-block reads from and writes to the residual streams.

A bundle holds `hc_mult` streams per row, always FP32. The mapping between streams is made doubly stochastic by Sinkhorn
iterations; its first index is the source stream (softmaxed), its second the target.
"""

from __future__ import annotations

import torch

from dsv4.checkpoint.weights import ModelWeights
from dsv4.config.model_config import ModelConfig
from dsv4.model.ops import inverse_rms, linear, sigmoid


class HyperConnection:
    """The connection around one half-block.

    Args:
        name: tensor name prefix, such as `layers.0.hc_attn`.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, name: str, device: torch.device) -> None:
        self._streams = config.hc_mult
        self._iterations = config.hc_sinkhorn_iters
        self._epsilon = config.hc_eps
        self._norm_epsilon = config.rms_norm_eps
        self._function = weights.vector(f"{name}_fn").to(device)
        self._base = weights.vector(f"{name}_base").to(device)
        self._compiled = device.type == "cpu"
        streams = self._streams
        repeats = torch.tensor([streams, streams, streams * streams], device=device)
        self._scale = weights.vector(f"{name}_scale").to(device).repeat_interleave(repeats)

    def read(self, bundle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mix the streams into the half-block's input.

        Args:
            bundle: [rows, streams, hidden].

        Returns:
            input [rows, hidden], write weights [rows, streams], mapping [rows, source, target]; all FP32.
        """
        flat = bundle.flatten(1)
        mixes = linear(flat, self._function).mul_(inverse_rms(flat, self._norm_epsilon))
        mixes = torch.addcmul(self._base, mixes, self._scale)
        if self._compiled:
            from dsv4.model.cpu_kernels import split_mixes as split
        else:
            split = split_mixes
        read_weights, write_weights, mapping = split(mixes, self._streams, self._iterations, self._epsilon)
        return torch.bmm(read_weights[:, None], bundle).squeeze(1), write_weights, mapping

    def write(
        self, output: torch.Tensor, bundle: torch.Tensor, write_weights: torch.Tensor, mapping: torch.Tensor
    ) -> torch.Tensor:
        """`new[o] = write_weights[o] * output + sum_i mapping[i, o] * bundle[i]`.

        Args:
            output: [rows, hidden] of the half-block.
            bundle: [rows, streams, hidden] that `read` got.
        """
        own = write_weights[:, :, None] * output[:, None, :]
        return torch.baddbmm(own, mapping.transpose(1, 2), bundle)


def split_mixes(
    mixes: torch.Tensor, streams: int, iterations: int, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read weights, write weights and mapping from their logits.

    The mapping is a row softmax and a column step, then rows and columns for the remaining iterations.

    Args:
        mixes: [rows, streams + streams + streams * streams] FP32.

    Returns:
        read weights [rows, streams], write weights [rows, streams], mapping [rows, source, target].
    """
    gates = sigmoid(mixes[:, : 2 * streams])
    offset = torch.tensor(epsilon, device=mixes.device)  # an operand: scalars are converted at each use
    mapping = mixes[:, 2 * streams :].unflatten(1, (streams, streams)).softmax(dim=2).add_(offset)
    mapping.div_(mapping.sum(dim=1, keepdim=True).add_(offset))
    for _ in range(iterations - 1):
        mapping.div_(mapping.sum(dim=2, keepdim=True).add_(offset))
        mapping.div_(mapping.sum(dim=1, keepdim=True).add_(offset))
    return gates[:, :streams] + offset, gates[:, streams:] * 2.0, mapping


class HyperConnectionHead:
    """Collapses the streams before the output head: only the reading half of a connection.

    Args:
        prefix: "" for the model, `mtp.0.` for a prediction layer.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, prefix: str, device: torch.device) -> None:
        self._epsilon = config.hc_eps
        self._norm_epsilon = config.rms_norm_eps
        self._function = weights.vector(f"{prefix}hc_head_fn").to(device)
        self._base = weights.vector(f"{prefix}hc_head_base").to(device)
        self._scale = weights.vector(f"{prefix}hc_head_scale").to(device)

    def __call__(self, bundle: torch.Tensor) -> torch.Tensor:
        """[rows, streams, hidden] -> [rows, hidden] FP32."""
        flat = bundle.flatten(1)
        mixes = linear(flat, self._function).mul_(inverse_rms(flat, self._norm_epsilon))
        read_weights = sigmoid(torch.addcmul(self._base, mixes, self._scale)).add_(self._epsilon)
        return torch.bmm(read_weights[:, None], bundle).squeeze(1)

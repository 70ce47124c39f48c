"""Fused CPU kernels for the hyper-connections, as autograd functions.

A hyper-connection of DeepSeek V4 mixes four residual streams with per-token 4x4 matrices that are made doubly
stochastic by twenty Sinkhorn steps.  Written with ordinary tensor operations this is thousands of tiny calls a
training step, more than half of the time of a small model on a CPU.  The kernels below do each part in one pass.
"""

from typing import Any

import numba
import numpy as np
import torch

STREAMS = 4


@numba.njit(cache=True, fastmath=True)
def _sinkhorn_forward(matrix: np.ndarray, sums: np.ndarray, results: np.ndarray, eps: float) -> None:
    """matrix [4 in, 4 out, tokens] -> results [steps, 4, 4, tokens]; sums [steps, 4, tokens] are the divisors."""
    steps, tokens = sums.shape[0], matrix.shape[2]
    for step in range(steps):
        over_inputs = step % 2 == 0
        for kept in range(STREAMS):
            for token in range(tokens):
                sums[step, kept, token] = eps
            for reduced in range(STREAMS):
                i, o = (reduced, kept) if over_inputs else (kept, reduced)
                if step == 0:
                    for token in range(tokens):
                        sums[step, kept, token] += matrix[i, o, token]
                else:
                    for token in range(tokens):
                        sums[step, kept, token] += results[step - 1, i, o, token]
            for reduced in range(STREAMS):
                i, o = (reduced, kept) if over_inputs else (kept, reduced)
                if step == 0:
                    for token in range(tokens):
                        results[step, i, o, token] = matrix[i, o, token] / sums[step, kept, token]
                else:
                    for token in range(tokens):
                        results[step, i, o, token] = results[step - 1, i, o, token] / sums[step, kept, token]


@numba.njit(cache=True, fastmath=True)
def _sinkhorn_backward(gradient: np.ndarray, sums: np.ndarray, results: np.ndarray, dot: np.ndarray) -> None:
    """Turn `gradient` [4, 4, tokens] of the last result into the gradient of the input, in place."""
    steps, tokens = sums.shape[0], gradient.shape[2]
    for back in range(steps):
        step = steps - 1 - back
        over_inputs = step % 2 == 0
        for kept in range(STREAMS):
            for token in range(tokens):
                dot[token] = 0.0
            for reduced in range(STREAMS):
                i, o = (reduced, kept) if over_inputs else (kept, reduced)
                for token in range(tokens):
                    dot[token] += gradient[i, o, token] * results[step, i, o, token]
            for reduced in range(STREAMS):
                i, o = (reduced, kept) if over_inputs else (kept, reduced)
                for token in range(tokens):
                    gradient[i, o, token] = (gradient[i, o, token] - dot[token]) / sums[step, kept, token]


class Sinkhorn(torch.autograd.Function):
    """Alternate column and row normalisation: one column step, then `iterations - 1` times (row, column)."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        steps, tokens = 2 * iterations - 1, matrix.shape[2]
        sums = torch.empty(steps, STREAMS, tokens)
        results = torch.empty(steps, STREAMS, STREAMS, tokens)
        _sinkhorn_forward(matrix.detach().contiguous().numpy(), sums.numpy(), results.numpy(), eps)
        ctx.save_for_backward(sums, results)
        return results[-1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sums, results = ctx.saved_tensors
        gradient = gradients[0].contiguous().clone()
        scratch = np.empty(gradient.shape[2], np.float32)
        _sinkhorn_backward(gradient.numpy(), sums.numpy(), results.numpy(), scratch)
        return gradient, None, None


@numba.njit(cache=True, fastmath=True)
def _collapse_forward(streams: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    tokens, _, width = streams.shape
    for token in range(tokens):
        w0, w1, w2, w3 = weights[0, token], weights[1, token], weights[2, token], weights[3, token]
        for column in range(width):
            out[token, column] = (
                w0 * streams[token, 0, column]
                + w1 * streams[token, 1, column]
                + w2 * streams[token, 2, column]
                + w3 * streams[token, 3, column]
            )


@numba.njit(cache=True, fastmath=True)
def _collapse_backward(
    gradient: np.ndarray, streams: np.ndarray, weights: np.ndarray, grad_streams: np.ndarray, grad_weights: np.ndarray
) -> None:
    tokens, _, width = streams.shape
    for token in range(tokens):
        for stream in range(STREAMS):
            weight = weights[stream, token]
            total = np.float32(0.0)
            for column in range(width):
                grad_streams[token, stream, column] = weight * gradient[token, column]
                total += gradient[token, column] * streams[token, stream, column]
            grad_weights[stream, token] = total


class Collapse(torch.autograd.Function):
    """`out[token] = sum_c weights[c, token] * streams[token, c]`; streams [tokens, 4, width], weights [4, tokens]."""

    @staticmethod
    def forward(ctx: Any, streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        streams, weights = streams.contiguous(), weights.contiguous()
        out = torch.empty(streams.shape[0], streams.shape[2])
        _collapse_forward(streams.detach().numpy(), weights.detach().numpy(), out.numpy())
        ctx.save_for_backward(streams, weights)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        streams, weights = ctx.saved_tensors
        grad_streams, grad_weights = torch.empty_like(streams), torch.empty_like(weights)
        _collapse_backward(
            gradients[0].contiguous().numpy(),
            streams.detach().numpy(),
            weights.detach().numpy(),
            grad_streams.numpy(),
            grad_weights.numpy(),
        )
        return grad_streams, grad_weights


@numba.njit(cache=True, fastmath=True)
def _mix_forward(streams: np.ndarray, update: np.ndarray, post: np.ndarray, comb: np.ndarray, out: np.ndarray) -> None:
    tokens, _, width = streams.shape
    for token in range(tokens):
        for o in range(STREAMS):
            p = post[o, token]
            c0, c1, c2, c3 = comb[0, o, token], comb[1, o, token], comb[2, o, token], comb[3, o, token]
            for column in range(width):
                out[token, o, column] = (
                    p * update[token, column]
                    + c0 * streams[token, 0, column]
                    + c1 * streams[token, 1, column]
                    + c2 * streams[token, 2, column]
                    + c3 * streams[token, 3, column]
                )


@numba.njit(cache=True, fastmath=True)
def _mix_backward(
    gradient: np.ndarray,
    streams: np.ndarray,
    update: np.ndarray,
    post: np.ndarray,
    comb: np.ndarray,
    grad_streams: np.ndarray,
    grad_update: np.ndarray,
    grad_post: np.ndarray,
    grad_comb: np.ndarray,
) -> None:
    tokens, _, width = streams.shape
    for token in range(tokens):
        p0, p1, p2, p3 = post[0, token], post[1, token], post[2, token], post[3, token]
        for column in range(width):
            grad_update[token, column] = (
                p0 * gradient[token, 0, column]
                + p1 * gradient[token, 1, column]
                + p2 * gradient[token, 2, column]
                + p3 * gradient[token, 3, column]
            )
        for i in range(STREAMS):
            c0, c1, c2, c3 = comb[i, 0, token], comb[i, 1, token], comb[i, 2, token], comb[i, 3, token]
            for column in range(width):
                grad_streams[token, i, column] = (
                    c0 * gradient[token, 0, column]
                    + c1 * gradient[token, 1, column]
                    + c2 * gradient[token, 2, column]
                    + c3 * gradient[token, 3, column]
                )
        for o in range(STREAMS):
            t, t0, t1, t2, t3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for column in range(width):
                g = gradient[token, o, column]
                t += g * update[token, column]
                t0 += g * streams[token, 0, column]
                t1 += g * streams[token, 1, column]
                t2 += g * streams[token, 2, column]
                t3 += g * streams[token, 3, column]
            grad_post[o, token] = t
            grad_comb[0, o, token], grad_comb[1, o, token] = t0, t1
            grad_comb[2, o, token], grad_comb[3, o, token] = t2, t3


class Mix(torch.autograd.Function):
    """`out[token, o] = post[o] * update[token] + sum_i comb[i, o] * streams[token, i]`.

    streams [tokens, 4, width], update [tokens, width], post [4, tokens], comb [4 in, 4 out, tokens].
    """

    @staticmethod
    def forward(
        ctx: Any, streams: torch.Tensor, update: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        saved = tuple(tensor.detach().contiguous() for tensor in (streams, update, post, comb))
        out = torch.empty_like(saved[0])
        _mix_forward(*(tensor.numpy() for tensor in saved), out.numpy())
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        saved = ctx.saved_tensors
        grads = tuple(torch.empty_like(tensor) for tensor in saved)
        _mix_backward(
            gradients[0].contiguous().numpy(),
            *(tensor.numpy() for tensor in saved),
            *(tensor.numpy() for tensor in grads),
        )
        return grads


@numba.njit(cache=True, fastmath=True)
def _inverse_rms(rows: np.ndarray, eps: float, inverse: np.ndarray) -> None:
    for row in range(rows.shape[0]):
        total = np.float32(0.0)
        for column in range(rows.shape[1]):
            total += rows[row, column] * rows[row, column]
        inverse[row] = 1.0 / np.sqrt(total / rows.shape[1] + eps)


@numba.njit(cache=True, fastmath=True)
def _add_rms_gradient(gradient: np.ndarray, rows: np.ndarray, factor: np.ndarray) -> None:
    for row in range(rows.shape[0]):
        f = factor[row]
        for column in range(rows.shape[1]):
            gradient[row, column] += f * rows[row, column]


class NormedProduct(torch.autograd.Function):
    """`weight @ rms(rows).T` for unweighted root-mean-square norm: rows [tokens, width], weight [values, width]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, eps: float, low_precision: bool) -> torch.Tensor:
        rows = rows.detach().contiguous()
        inverse = torch.empty(rows.shape[0])
        _inverse_rms(rows.numpy(), eps, inverse.numpy())
        if low_precision:
            product = torch.mm(weight.detach().bfloat16(), rows.bfloat16().t()).float()
        else:
            product = torch.mm(weight.detach(), rows.t())
        out = product * inverse
        ctx.save_for_backward(rows, weight.detach(), inverse, out)
        ctx.low_precision = low_precision
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        rows, weight, inverse, out = ctx.saved_tensors
        scaled = gradients[0] * inverse
        if ctx.low_precision:
            scaled16 = scaled.bfloat16()
            grad_weight = torch.mm(scaled16, rows.bfloat16()).float()
            grad_rows = torch.mm(scaled16.t(), weight.bfloat16()).float()
        else:
            grad_weight, grad_rows = torch.mm(scaled, rows), torch.mm(scaled.t(), weight)
        factor = -(gradients[0] * out).sum(0) * inverse.square() / rows.shape[1]
        _add_rms_gradient(grad_rows.numpy(), rows.numpy(), factor.contiguous().numpy())
        return grad_rows, grad_weight, None, None

"""From logits to the next token of one request, independent of what else is in the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dsv4.engine.structured_output import OutputConstraint
from dsv4.sampling_parameters import SamplingParameters


@dataclass(frozen=True)
class SampledToken:
    """A token; its log probability and the likeliest alternatives (id, log probability) when asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one request.

    The order is vLLM's: log probabilities come from the raw logits; then bias and minimum length, penalties,
    temperature, min_p, top_k, top_p. The nucleus keeps the token that crosses `top_p` (Holtzman et al., 2020).

    Args:
        stop_token_ids: ids that must not come before `min_tokens`.
        constraint: what the output must match. A draft is accepted only if it is what the constrained choice yields.
        seed: of the request's own random numbers. The number for output token i depends on the seed and on i alone, so
            neither the batch, nor speculation, nor a step that is computed again changes what is drawn.
    """

    def __init__(
        self,
        parameters: SamplingParameters,
        prompt_token_ids: Sequence[int],
        *,
        stop_token_ids: frozenset[int],
        seed: int,
        constraint: OutputConstraint | None = None,
    ) -> None:
        self._parameters = parameters
        self._constraint = constraint
        self._stop_token_ids = sorted(stop_token_ids)
        self._seed = seed & (2**64 - 1)
        self._bias = {int(token): bias for token, bias in (parameters.logit_bias or {}).items()}
        self._seen = sorted(set(prompt_token_ids)) if parameters.repetition_penalty != 1.0 else []

    @property
    def constrained(self) -> bool:
        """Whether drafts have to be chosen by `draft`."""
        return self._constraint is not None

    @property
    def finished(self) -> bool:
        """The constraint allows nothing after the last token."""
        return self._constraint is not None and self._constraint.finished

    @property
    def plain_greedy(self) -> bool:
        """The token is the argmax of the raw logits and nothing else is asked for."""
        p = self._parameters
        return (
            p.greedy
            and self._constraint is None
            and p.logprobs is None
            and not self._bias
            and p.min_tokens == 0
            and p.presence_penalty == 0.0
            and p.frequency_penalty == 0.0
            and p.repetition_penalty == 1.0
        )

    def sample(self, logits: torch.Tensor, output_token_ids: Sequence[int]) -> SampledToken:
        """Choose the token after `output_token_ids`.

        Args:
            logits: [vocab] FP32, not modified.
            output_token_ids: the request's output so far.
        """
        adjusted = self._adjust(logits.to("cpu", torch.float32, copy=True), output_token_ids)
        if self._parameters.greedy:
            token = int(adjusted.argmax())
        else:
            token = self._draw(self._probabilities(adjusted), len(output_token_ids))
        if self._constraint is not None:
            self._constraint.accept(token)
        return self._describe(token, logits)

    def draft(self, logits: torch.Tensor, index: int) -> int | None:
        """Choose a draft for output token `index`, None when nothing may follow.

        Args:
            logits: [vocab] FP32 of the prediction layer, not modified.
        """
        if self._constraint is None:
            return int(logits.argmax())
        if self.finished:
            return None
        allowed = logits.to("cpu", torch.float32, copy=True)
        self._constraint.mask(allowed, index)
        token = int(allowed.argmax())
        self._constraint.accept(token)
        return token

    def _adjust(self, logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        p = self._parameters
        for token, bias in self._bias.items():
            logits[token] += bias
        if self._constraint is not None:
            self._constraint.mask(logits, len(output))
        if len(output) < p.min_tokens and self._stop_token_ids:
            self._forbid_stops(logits)
        if p.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*self._seen, *output}), dtype=torch.int64)
            values = logits[seen]
            logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if (p.frequency_penalty or p.presence_penalty) and output:
            counts = Counter(output)
            tokens = torch.tensor(list(counts), dtype=torch.int64)
            times = torch.tensor(list(counts.values()), dtype=torch.float32)
            logits[tokens] -= p.frequency_penalty * times + p.presence_penalty
        return logits

    def _forbid_stops(self, logits: torch.Tensor) -> None:
        held = logits[self._stop_token_ids]
        logits[self._stop_token_ids] = float("-inf")
        if bool(torch.isneginf(logits).all()):
            # A grammar may allow nothing but the end.
            logits[self._stop_token_ids] = held

    def _probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        p = self._parameters
        probabilities = torch.softmax(logits.double() / p.temperature, dim=-1)
        if p.min_p > 0.0:
            probabilities[probabilities < p.min_p * probabilities.max()] = 0.0
        if p.top_k > 0 and p.top_k < probabilities.shape[0]:
            kept = torch.topk(probabilities, p.top_k).indices
            mask = torch.zeros_like(probabilities, dtype=torch.bool)
            mask[kept] = True
            probabilities[~mask] = 0.0
        if p.top_p < 1.0:
            ordered, index = torch.sort(probabilities, descending=True, stable=True)
            ordered /= ordered.sum()
            before = torch.cumsum(ordered, dim=0) - ordered
            probabilities[index[before >= p.top_p]] = 0.0
        return probabilities

    def _draw(self, probabilities: torch.Tensor, index: int) -> int:
        cumulative = torch.cumsum(probabilities, dim=0)
        uniform = np.random.Generator(np.random.Philox(key=self._seed, counter=index)).random()
        point = uniform * cumulative[-1]
        token = int(torch.searchsorted(cumulative, point, right=True))
        if token >= probabilities.shape[0] or probabilities[token] == 0.0:
            return int(probabilities.argmax())
        return token

    def _describe(self, token: int, logits: torch.Tensor) -> SampledToken:
        count = self._parameters.logprobs
        if count is None:
            return SampledToken(token)
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        top: tuple[tuple[int, float], ...] = ()
        if count:
            values, tokens = torch.topk(logprobs, min(count, logprobs.shape[0]))
            top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return SampledToken(token, float(logprobs[token]), top)

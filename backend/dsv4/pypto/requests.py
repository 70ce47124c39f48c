"""What one request asks for, checked against what upstream's engine can do, before anything is generated.

A request that upstream cannot serve would fail inside a batch there and take all other requests of that batch with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.errors import invalid_argument
from dsv4.pypto.options import PyptoOptions, Speculation
from dsv4.sampling_parameters import SamplingParameters, unsupported

USE_REFERENCE = "the PyPTO engine cannot do this; the reference engine can (--backend cpu)"


@dataclass(frozen=True)
class Limits:
    """What every request of one engine must respect.

    Attributes:
        context: prompt and output together may have so many tokens.
        vocabulary: token ids are below this.
    """

    context: int
    vocabulary: int
    speculation: Speculation
    seeded_sampling: bool


def context_limit(options: PyptoOptions) -> int:
    """Usable context. Up to two steps in flight reserve `1 + drafts` positions each; near the end of the block table
    older upstream versions then preempt a neighbour and compute wrong tokens for it, or never finish.
    """
    reserved = 2 * (1 + options.speculation.draft_tokens) if options.speculation.draft_tokens else 2
    return max(2, options.max_model_len - reserved)


def check_prompt(token_ids: Sequence[int], limits: Limits) -> None:
    """Raises RequestError INVALID_ARGUMENT for ids outside the vocabulary and for a prompt that leaves no room."""
    if not token_ids:
        raise invalid_argument("input_ids", "must not be empty")
    largest, smallest = max(token_ids), min(token_ids)
    if smallest < 0 or largest >= limits.vocabulary:
        wrong = smallest if smallest < 0 else largest
        raise invalid_argument("input_ids", f"{wrong} is not a token id (the vocabulary has {limits.vocabulary})")
    if len(token_ids) >= limits.context:
        raise invalid_argument(
            "input_ids", f"the prompt has {len(token_ids)} tokens; at most {limits.context - 1} fit this server"
        )


def check_sampling(parameters: SamplingParameters, limits: Limits) -> None:
    """Raises RequestError UNSUPPORTED that names the field."""
    speculating = limits.speculation.draft_tokens > 0
    sampling = not parameters.greedy
    refusals: tuple[tuple[str, bool, str], ...] = (
        (
            "temperature",
            sampling and speculating,
            f"the PyPTO engine is greedy with {limits.speculation.method} speculation; use temperature 0, or start the "
            "server without --speculative-config",
        ),
        (
            "seed",
            sampling and parameters.seed is not None and not limits.seeded_sampling,
            "this version of the PyPTO engine samples without a seed",
        ),
        ("logprobs", parameters.logprobs is not None, USE_REFERENCE),
        ("prompt_logprobs", parameters.prompt_logprobs is not None, USE_REFERENCE),
        ("presence_penalty", parameters.presence_penalty != 0.0, USE_REFERENCE),
        ("frequency_penalty", parameters.frequency_penalty != 0.0, USE_REFERENCE),
        ("repetition_penalty", parameters.repetition_penalty != 1.0, USE_REFERENCE),
        ("logit_bias", bool(parameters.logit_bias), USE_REFERENCE),
        ("min_p", sampling and parameters.min_p > 0.0, USE_REFERENCE),
        ("min_tokens", parameters.min_tokens > 0, USE_REFERENCE),
        ("structured_outputs", parameters.structured_outputs is not None, USE_REFERENCE),
    )
    for field, refused, reason in refusals:
        if refused:
            raise unsupported(field, reason)


def new_token_limit(parameters: SamplingParameters, num_prompt_tokens: int, limits: Limits) -> int:
    """Tokens to generate at most, at least 1."""
    room = limits.context - num_prompt_tokens
    return room if parameters.max_tokens is None else min(parameters.max_tokens, room)


def generate_fields(parameters: SamplingParameters, max_new_tokens: int, known: frozenset[str]) -> dict[str, Any]:
    """Fields of upstream's GenerateConfig. Stop strings stay with us: upstream misses them inside an MTP step."""
    fields: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": parameters.temperature,
        "top_p": parameters.top_p,
        "top_k": parameters.top_k if parameters.top_k > 0 else None,
        "stop": (),
        "stream": True,
        "ignore_eos": parameters.ignore_eos,
        "seed": parameters.seed,
    }
    return {name: value for name, value in fields.items() if name in known}

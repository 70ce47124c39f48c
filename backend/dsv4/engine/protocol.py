"""Messages between the engine and whoever drives it: the same for every engine.

They travel as msgpack over ZeroMQ between processes, and as plain objects inside one.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from dsv4.sampling_parameters import SamplingParameters


class FinishReason(enum.Enum):
    """Why a request ended by itself. Errors are not finish reasons: see `RequestOutput.error`."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. Exactly one of `prompt_token_ids` and `prompt_text` is given.

    Attributes:
        request_id: unique among the live requests of one engine; the caller sees to that.
        prompt_token_ids: token ids, each below the vocabulary size.
        prompt_text: raw text; the engine tokenizes it with the added vocabulary and without BOS.
        output_format: the object written by the encode step (reasoning, content and tool-call splitting), None for
            plain text.
        timeout_seconds: deadline from submission, in the queue and while running; None means none.
    """

    request_id: str
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    sampling_parameters: SamplingParameters = SamplingParameters()
    output_format: dict[str, Any] | None = None
    timeout_seconds: float | None = None


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log probability of one sampled token (natural logarithm) and of the most likely alternatives."""

    token_id: int
    token: str
    logprob: float
    top: list[tuple[int, str, float]] = []


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request, as OpenAI's `usage` plus speculation."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step adds to one request. The last output has `finish_reason` or `error`.

    Attributes:
        token_ids: new token ids, in order (several under speculation).
        text: new text, always a delta; stop strings are trimmed.
        chat_delta: merged OpenAI delta of this step when the request has an `output_format`.
        logprobs: one entry per new token when asked for.
        stop_reason: the stop string or stop token id that ended the request; None for EOS.
        usage: totals, on the last output.
        error: coded message ("[DEADLINE] ..."); ends the request.
    """

    request_id: str
    token_ids: list[int] = []
    text: str = ""
    chat_delta: dict[str, Any] | None = None
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    num_prompt_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

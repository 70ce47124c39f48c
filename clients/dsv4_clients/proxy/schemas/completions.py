"""`/v1/completions`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dsv4_clients.proxy.schemas.common import FinishReason, GenerationFields, ResponseModel, TokenIds, Usage

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""

Prompt = str | list[str] | TokenIds | list[TokenIds]


class CompletionRequest(GenerationFields):
    """A text completion request as OpenAI and vLLM define it: the prompt goes to the model as it is."""

    prompt: Prompt = Field(description="Text, token ids, or a list of either.")
    max_tokens: int | None = Field(None, ge=1, description=f"Default: {DEFAULT_MAX_TOKENS}, as OpenAI's.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Alternatives per token.")
    echo: bool | None = Field(None, description="Put the prompt in front of the text.")
    suffix: str | None = Field(None, description="Refused: the model's fill-in-the-middle mode is not offered.")
    best_of: int | None = Field(None, description="Refused unless it equals n.")


class CompletionLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage

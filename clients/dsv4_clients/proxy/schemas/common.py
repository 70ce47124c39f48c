"""Parts that several endpoints share."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


class RequestModel(BaseModel):
    """Base of request bodies: unknown fields and values of a wrong JSON type are errors."""

    not_offered: ClassVar[dict[str, str]] = {}
    """Fields of other servers with the reason that the client is told."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, data: Any) -> Any:
        """A misspelt field must not be ignored in silence; the error gives the nearest known name."""
        if not isinstance(data, dict):
            return data
        for name in data:
            if name not in cls.model_fields:
                if name in cls.not_offered:
                    raise PydanticCustomError(
                        "not_offered", "{reason}", {"name": name, "reason": cls.not_offered[name]}
                    )
                nearest = difflib.get_close_matches(name, cls.model_fields, n=1)
                hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
                raise PydanticCustomError("unknown_field", "unknown field{hint}", {"name": name, "hint": hint})
        return data


class ResponseModel(BaseModel):
    """Base of response bodies; they are documented by these models and written without them."""

    model_config = ConfigDict(extra="forbid")


class ErrorObject(ResponseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = Field(description="Stable lower-case code, such as invalid_argument or queue_full.")


class ErrorResponse(ResponseModel):
    """OpenAI's error body."""

    error: ErrorObject


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(None, description="Send one more chunk with the usage before [DONE].")
    continuous_usage_stats: bool | None = Field(None, description="Put the usage so far into every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted, no effect: chunks are never padded.")


class SamplingFields(RequestModel):
    """Sampling parameters under OpenAI's and vLLM's names. Without any of them decoding is greedy."""

    temperature: float | None = Field(None, ge=0, le=2, description="0 (the default) is greedy decoding.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="-1 and 0: all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = Field(None, description="At most 16 strings that end the text; not part of it.")
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[str, float] | None = Field(None, description="Token id (as a string) to a value from -100 to 100.")
    structured_outputs: dict[str, Any] | None = Field(None, description="vLLM's structured output constraint.")
    guided_json: str | dict[str, Any] | None = Field(None, description="Old name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="Old name of structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, description="Old name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="Old name of structured_outputs.grammar.")
    priority: int | None = Field(None, description="Lower runs first.")


class GenerationFields(SamplingFields):
    """Fields of both completion endpoints."""

    not_offered: ClassVar[dict[str, str]] = {
        "functions": "is not supported; use tools",
        "function_call": "is not supported; use tool_choice",
        "audio": "is not supported; the model reads and writes text",
        "prediction": "is not supported",
        "web_search_options": "is not supported",
        "use_beam_search": "is not supported",
        "prompt_logprobs": "is not supported here",
    }

    model: str | None = Field(None, description="One of the served model names; may be left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128, description="More than 1 needs temperature above 0.")
    return_token_ids: bool | None = Field(None, description="Add prompt_token_ids and token_ids (as vLLM does).")
    user: str | None = Field(None, description="Accepted, no effect.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted, no effect.")
    store: bool | None = Field(None, description="Accepted, nothing is stored.")
    service_tier: str | None = Field(None, description="Accepted, no effect.")
    safety_identifier: str | None = Field(None, description="Accepted, no effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted, no effect.")


FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(ResponseModel):
    cached_tokens: int = Field(description="Prompt tokens taken from the prefix cache.")


class CompletionTokensDetails(ResponseModel):
    reasoning_tokens: int = Field(description="Tokens inside the reasoning, markers excluded.")
    accepted_prediction_tokens: int | None = Field(None, description="Tokens that came from accepted MTP drafts.")
    rejected_prediction_tokens: int | None = Field(None, description="MTP drafts that were not accepted.")


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


TokenIds = Annotated[list[int], Field(min_length=1)]

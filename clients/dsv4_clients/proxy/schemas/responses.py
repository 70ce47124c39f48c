"""`/v1/responses`: OpenAI's responses API, without stored state."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from dsv4_clients.proxy.schemas.chat import ReasoningEffort
from dsv4_clients.proxy.schemas.common import RequestModel, ResponseModel

_STATELESS = "is not supported: responses are not stored; send the items of earlier turns in input"


class ReasoningOptions(RequestModel):
    effort: ReasoningEffort | None = Field(None, description="Any level above none turns thinking on.")
    summary: str | None = Field(None, description="Accepted, no effect: the reasoning itself is returned.")
    generate_summary: str | None = None
    context: str | None = None


class TextOptions(RequestModel):
    format: dict[str, Any] | None = Field(None, description="text, json_object or json_schema.")
    verbosity: str | None = Field(None, description="Accepted, no effect.")


class ResponsesRequest(RequestModel):
    """Input items: messages, function calls, function call outputs, reasoning. Nothing is stored."""

    not_offered: ClassVar[dict[str, str]] = {
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "prompt": "is not supported: there are no stored prompts",
        "max_tool_calls": "is not supported: there are no built-in tools",
    }

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = Field(None, description="Function tools.")
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, description="0 (the default) is greedy decoding.")
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    stream_options: dict[str, Any] | None = Field(None, description="Accepted, no effect.")
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: list[str] | None = Field(None, description="Accepted, no effect.")
    store: bool | None = Field(None, description="Accepted, nothing is stored.")
    metadata: dict[str, str] | None = Field(None, description="Returned as it is.")
    user: str | None = Field(None, description="Accepted, no effect.")
    service_tier: str | None = Field(None, description="Accepted, no effect.")
    safety_identifier: str | None = Field(None, description="Accepted, no effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted, no effect.")


class InputTokensDetails(ResponseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(ResponseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]] = Field(description="Items of type reasoning, message and function_call.")
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None

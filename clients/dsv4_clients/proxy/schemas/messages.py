"""`/v1/messages`: Anthropic's messages API."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from dsv4_clients.proxy.schemas.common import RequestModel, ResponseModel

ContentBlocks = list[dict[str, Any]]


class MessageParam(BaseModel):
    """One message. Content blocks: text, thinking, redacted_thinking, tool_use, tool_result."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["user", "assistant", "system"]
    content: str | ContentBlocks


class MessageTool(BaseModel):
    """A tool that the client runs; Anthropic's server-side tools are not offered."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class MessageToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageThinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="Accepted, no effect: max_tokens is the budget.")
    display: str | None = Field(None, description="Accepted, no effect.")


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = Field(None, description="json_schema output.")


class CountTokensRequest(RequestModel):
    """What determines the prompt."""

    not_offered: ClassVar[dict[str, str]] = {
        "container": "is not supported",
        "mcp_servers": "is not supported; give tools",
    }

    model: str | None = Field(None, description="One of the served model names.")
    messages: list[MessageParam] = Field(min_length=1)
    system: str | ContentBlocks | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: MessageThinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = Field(None, description="Accepted, no effect.")


class MessagesRequest(CountTokensRequest):
    """A request of Anthropic's messages API. Decoding is greedy unless `temperature` is above 0."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    metadata: dict[str, Any] | None = Field(None, description="Accepted, no effect.")
    service_tier: str | None = Field(None, description="Accepted, no effect.")


class TextBlock(ResponseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(ResponseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(ResponseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(ResponseModel):
    input_tokens: int = Field(description="Prompt tokens that were not in the prefix cache.")
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class Message(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ResponseModel):
    input_tokens: int


class AnthropicErrorObject(ResponseModel):
    type: str
    message: str


class AnthropicErrorResponse(ResponseModel):
    """Anthropic's error body."""

    type: Literal["error"]
    error: AnthropicErrorObject

"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dsv4_clients.proxy.schemas.common import FinishReason, GenerationFields, RequestModel, ResponseModel, Usage

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatMessage(BaseModel):
    """One message of the conversation.

    The encode step checks messages in depth (roles, tool results, order), so this model only describes them.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "user", "developer", "assistant", "latest_reminder", "tool"]
    content: str | list[dict[str, Any]] | None = Field(None, description="Text, or a list of text parts.")
    reasoning_content: str | None = Field(None, description="Reasoning of an assistant turn; `reasoning` works too.")
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, description="Calls of an assistant turn.")
    tool_call_id: str | None = Field(None, description="The call that a tool message answers.")
    prefix: bool | None = Field(None, description="Continue this last assistant message instead of closing it.")


class ThinkingSwitch(RequestModel):
    type: Literal["enabled", "disabled"]


class ChatCompletionRequest(GenerationFields):
    """A chat completion request as OpenAI, vLLM and DeepSeek's API define it. Chat mode is the default."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="Default: up to the model's context.")
    max_completion_tokens: int | None = Field(None, ge=1, description="OpenAI's newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = Field(None, description="Function tools.")
    tool_choice: str | dict[str, Any] | None = Field(None, description="none, auto, required or a named function.")
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = Field(None, description="text, json_object or json_schema.")
    reasoning_effort: ReasoningEffort | None = Field(None, description="Any level above none turns thinking on.")
    thinking: ThinkingSwitch | None = Field(None, description="DeepSeek's switch.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="enable_thinking (or thinking) wins over reasoning_effort; drop_thinking."
    )
    include_reasoning: bool | None = Field(None, description="false hides the reasoning; it is still counted.")
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: list[Literal["text"]] | None = None


class FunctionCall(ResponseModel):
    name: str
    arguments: str = Field(description="A JSON object.")


class ToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same text as reasoning_content.")
    tool_calls: list[ToolCall] | None = None
    refusal: None = None


class TopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ChatTokenLogprob]


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None

"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from dsv4_clients.proxy.schemas.chat import ChatMessage, ReasoningEffort, ThinkingSwitch
from dsv4_clients.proxy.schemas.common import RequestModel, ResponseModel


class TokenizeRequest(RequestModel):
    """Exactly one of `prompt` and `messages`; the other fields are those of a chat completion request."""

    model: str | None = None
    prompt: str | None = Field(None, description="Raw text; control tokens spelled in it count as such.")
    add_special_tokens: bool | None = Field(None, description="Accepted, no effect: the tokenizer adds none.")
    return_token_strs: bool | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking: ThinkingSwitch | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class TokenizeResponse(ResponseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(ResponseModel):
    prompt: str

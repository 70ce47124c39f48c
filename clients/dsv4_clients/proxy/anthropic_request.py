"""From Anthropic's messages request to the chat request that the encode step reads."""

from __future__ import annotations

import json
from typing import Any

from dsv4_clients.proxy.errors import invalid, unsupported
from dsv4_clients.proxy.schemas.chat import ChatCompletionRequest
from dsv4_clients.proxy.schemas.messages import CountTokensRequest, MessageParam, MessagesRequest, MessageTool
from dsv4_clients.proxy.validation import validated

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_FIELDS = {"name", "description", "input_schema", "cache_control", "type", "strict", "eager_input_streaming"}


def to_chat_request(body: CountTokensRequest) -> ChatCompletionRequest:
    """The same request as a chat completion. Raises ApiError naming the field that has no counterpart."""
    fields: dict[str, Any] = {"messages": _messages(body)}
    if body.model is not None:
        fields["model"] = body.model
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    fields.update(_tool_choice(body))
    fields.update(_thinking(body))
    if body.output_config is not None and body.output_config.format is not None:
        fields["response_format"] = _response_format(body.output_config.format)
    if isinstance(body, MessagesRequest):
        fields.update(_sampling(body))
    return validated(ChatCompletionRequest, fields)


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": body.max_tokens}
    for name in ("temperature", "top_p", "top_k", "stream"):
        if getattr(body, name) is not None:
            fields[name] = getattr(body, name)
    if body.stop_sequences:
        fields["stop"] = body.stop_sequences
    return fields


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages = []
    if body.system:
        messages.append({"role": "system", "content": _text_content(body.system, "system")})
    for index, message in enumerate(body.messages):
        path = f"messages[{index}].content"
        if message.role == "assistant":
            messages.append(_assistant(message, path))
        elif message.role == "system":
            messages.append({"role": "system", "content": _text_content(message.content, path)})
        else:
            messages += _user(message, path)
    return messages


def _user(message: MessageParam, path: str) -> list[dict[str, Any]]:
    """A user message may mix text and tool results; each becomes a message of its own, in order."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        block_path = f"{path}[{index}]"
        if block.get("type") == "tool_result":
            content = _text_content(block.get("content") or "", f"{block_path}.content")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            messages.append({"role": "user", "content": _text_of(block, block_path)})
    if not messages:
        raise invalid(path, "must not be empty")
    return messages


def _assistant(message: MessageParam, path: str) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    text, reasoning = "", ""
    calls = []
    for index, block in enumerate(message.content):
        kind = block.get("type")
        if kind == "thinking":
            reasoning += str(block.get("thinking") or "")
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            text += _text_of(block, f"{path}[{index}]")
    converted: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        converted["reasoning_content"] = reasoning
    if calls:
        converted["tool_calls"] = calls
    return converted


def _text_content(content: str | list[dict[str, Any]], path: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": _text_of(block, f"{path}[{index}]")} for index, block in enumerate(content)]


def _text_of(block: dict[str, Any], path: str) -> str:
    if block.get("type") != "text":
        raise unsupported(f"{path}.type", f"only text is supported here, not {block.get('type')!r}")
    if not isinstance(block.get("text"), str):
        raise invalid(f"{path}.text", "must be a string")
    return str(block["text"])


def _tool(tool: MessageTool, path: str) -> dict[str, Any]:
    extra = tool.model_extra or {}
    if extra.get("type") not in (None, "custom"):
        raise unsupported(f"{path}.type", f"only custom tools are supported, not {extra['type']!r}")
    for name in extra:
        if name not in _TOOL_FIELDS:
            raise invalid(f"{path}.{name}", "unknown field")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if extra.get("strict") is not None:
        function["strict"] = extra["strict"]
    return {"type": "function", "function": function}


def _tool_choice(body: CountTokensRequest) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    fields: dict[str, Any] = {}
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name", "is required when type is 'tool'")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = _TOOL_CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _thinking(body: CountTokensRequest) -> dict[str, Any]:
    effort = body.output_config.effort if body.output_config is not None else None
    fields: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if body.thinking is None:
        # An effort alone does not turn thinking on in Anthropic's API.
        fields["thinking"] = {"type": "disabled"}
    else:
        fields["thinking"] = {"type": "disabled" if body.thinking.type == "disabled" else "enabled"}
    return fields


def _response_format(output_format: dict[str, Any]) -> dict[str, Any]:
    if output_format.get("type") != "json_schema":
        raise unsupported("output_config.format.type", "must be 'json_schema'")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format.get("schema")}}

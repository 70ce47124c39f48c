"""From a request of OpenAI's responses API to the chat request that the encode step reads."""

from __future__ import annotations

from typing import Any

from dsv4_clients.proxy.errors import invalid, unsupported
from dsv4_clients.proxy.schemas.chat import ChatCompletionRequest
from dsv4_clients.proxy.schemas.responses import ResponsesRequest
from dsv4_clients.proxy.validation import validated

_PLAIN_FIELDS = ("model", "parallel_tool_calls", "temperature", "top_p", "stream")
_TEXT_PARTS = ("input_text", "output_text", "text")


def to_chat_request(body: ResponsesRequest) -> ChatCompletionRequest:
    """The same request as a chat completion. Raises ApiError naming the field that has no counterpart."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _PLAIN_FIELDS if getattr(body, name) is not None}
    fields["messages"] = _messages(body)
    if body.max_output_tokens is not None:
        fields["max_tokens"] = body.max_output_tokens
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    return validated(ChatCompletionRequest, fields)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
        return messages
    turn = _AssistantTurn()
    for index, item in enumerate(body.input):
        path = f"input[{index}]"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message" and item.get("role") == "assistant":
            turn.add_text(_text(item.get("content"), f"{path}.content"), messages)
        elif kind == "reasoning":
            turn.add_reasoning(_reasoning(item, path), messages)
        elif kind == "function_call":
            turn.add_call(item)
        else:
            turn.end(messages)
            messages.append(_input_item(item, kind, path))
    turn.end(messages)
    if not messages:
        raise invalid("input", "must not be empty")
    return messages


class _AssistantTurn:
    """Joins what one assistant turn consists of: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self._message: dict[str, Any] | None = None

    def add_reasoning(self, text: str, messages: list[dict[str, Any]]) -> None:
        if self._message is not None and (self._message["content"] or "tool_calls" in self._message):
            self.end(messages)
        message = self._start()
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def add_text(self, text: str, messages: list[dict[str, Any]]) -> None:
        if self._message is not None and "tool_calls" in self._message:
            self.end(messages)
        message = self._start()
        message["content"] += text

    def add_call(self, item: dict[str, Any]) -> None:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        self._start().setdefault("tool_calls", []).append(call)

    def end(self, messages: list[dict[str, Any]]) -> None:
        if self._message is not None:
            messages.append(self._message)
            self._message = None

    def _start(self) -> dict[str, Any]:
        if self._message is None:
            self._message = {"role": "assistant", "content": ""}
        return self._message


def _input_item(item: dict[str, Any], kind: Any, path: str) -> dict[str, Any]:
    if kind == "message":
        return {"role": item.get("role"), "content": _text(item.get("content"), f"{path}.content")}
    if kind == "function_call_output":
        output = _text(item.get("output"), f"{path}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    raise unsupported(
        f"{path}.type", f"must be message, reasoning, function_call or function_call_output, not {kind!r}"
    )


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(path, "must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise unsupported(f"{path}[{index}].type", f"only text is supported here, not {kind!r}")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{path}[{index}].text", "must be a string")
        texts.append(part["text"])
    return "\n\n".join(texts)


def _reasoning(item: dict[str, Any], path: str) -> str:
    """The reasoning text that this server returned before; summaries of other servers are not reasoning."""
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise invalid(f"{path}.content", "must be a list of reasoning_text parts")
    return "".join(str(part.get("text") or "") for part in parts)


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"{path}.type", f"only function tools are supported, not {tool.get('type')!r}")
    names = ("name", "description", "parameters", "strict")
    for name in tool:
        if name not in ("type", *names):
            raise invalid(f"{path}.{name}", "unknown field")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text_format: dict[str, Any]) -> dict[str, Any]:
    if text_format.get("type") != "json_schema":
        return text_format
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in text_format.items() if name != "type" and value is not None},
    }

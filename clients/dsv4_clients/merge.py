"""Joining the deltas of a streamed chat completion."""

from __future__ import annotations

from typing import Any


def merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Append an OpenAI chat delta to the message made so far; tool calls are joined by their index."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value:
                _merge_call(calls, part)
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value
        elif value is not None:
            message[name] = value


def _merge_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.get("index", len(calls))
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[index]
    call["id"] = part.get("id") or call["id"]
    function = part.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""

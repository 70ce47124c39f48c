"""Joining the OpenAI deltas of one output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def merge_deltas(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several OpenAI deltas as one: strings are joined, tool calls are joined by index."""
    merged: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for key, value in delta.items():
            if key == "tool_calls":
                for call in value:
                    _merge_call(calls, call)
            elif key in ("content", "reasoning", "reasoning_content") and isinstance(value, str):
                merged[key] = (merged.get(key) or "") + value
            else:
                merged[key] = value
    if calls:
        merged["tool_calls"] = list(calls.values())
    return merged


def _merge_call(calls: dict[int, dict[str, Any]], call: dict[str, Any]) -> None:
    known = calls.get(call["index"])
    if known is None:
        calls[call["index"]] = {**call, "function": dict(call.get("function") or {})}
        return
    function = call.get("function") or {}
    known.update({key: value for key, value in call.items() if key != "function"})
    for key, value in function.items():
        if key == "arguments":
            known["function"][key] = (known["function"].get(key) or "") + value
        else:
            known["function"][key] = value

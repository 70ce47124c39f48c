"""From engine outputs to Anthropic's message object and its stream events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from dsv4_clients.proxy.chat_completion import ChatRun, chat_message
from dsv4_clients.proxy.context import ProxyContext
from dsv4_clients.proxy.errors import ApiError
from dsv4_clients.proxy.generation import ChoiceResult, collect_generations, run_generations
from dsv4_clients.proxy.segments import Segment, SegmentEvent, SegmentTracker, segments_of
from dsv4_clients.proxy.sse import named_event
from dsv4_clients.proxy.triton_client import EngineOutput
from dsv4_clients.proxy.usage import UsageTotals

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def complete_message(context: ProxyContext, run: ChatRun) -> dict[str, Any]:
    """The whole answer as a message object."""
    (result,) = await collect_generations(context, run.generations)
    usage = UsageTotals()
    usage.add(0, result.usage)
    message = _empty_message(run)
    message["content"] = [_block(segment) for segment in segments_of(chat_message(result))]
    message.update(_stop(result.finish_reason, result.stop_reason))
    message["usage"] = _usage(usage)
    return message


def _empty_message(run: ChatRun) -> dict[str, Any]:
    return {
        "id": run.id,
        "type": "message",
        "role": "assistant",
        "model": run.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _block(segment: Segment) -> dict[str, Any]:
    if segment.kind == "reasoning":
        return {"type": "thinking", "thinking": segment.text, "signature": ""}
    if segment.kind == "text":
        return {"type": "text", "text": segment.text}
    return {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": _arguments(segment.text)}


def _arguments(text: str) -> dict[str, Any]:
    """A call cut off by the length limit has incomplete JSON, which the object form cannot show."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _stop(finish_reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _STOP_REASONS.get(finish_reason or "", "end_turn"), "stop_sequence": None}


def _usage(usage: UsageTotals) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


async def message_events(context: ProxyContext, run: ChatRun) -> AsyncGenerator[bytes, None]:
    """The answer as Anthropic's server-sent events, from message_start to message_stop."""
    tracker = SegmentTracker()
    usage = UsageTotals()
    last = ChoiceResult()
    started = False
    outputs = run_generations(context, run.generations)
    try:
        async for _, output in outputs:
            if not started:
                started = True
                yield _start(run)
            _note_end(output, usage, last)
            for segment_event in tracker.push(output.chat_delta or {}):
                yield _event(segment_event)
    finally:
        await outputs.aclose()
    for segment_event in tracker.close():
        yield _event(segment_event)
    stop = _stop(last.finish_reason, last.stop_reason)
    yield named_event("message_delta", {"type": "message_delta", "delta": stop, "usage": _usage(usage)})
    yield named_event("message_stop", {"type": "message_stop"})


def _note_end(output: EngineOutput, usage: UsageTotals, last: ChoiceResult) -> None:
    if output.usage is not None:
        usage.add(0, output.usage)
    if output.finish_reason is not None:
        last.finish_reason, last.stop_reason = output.finish_reason, output.stop_reason


def _start(run: ChatRun) -> bytes:
    usage = UsageTotals()
    usage.add(0, {"prompt_tokens": len(run.encoded.input_ids)})
    message = {**_empty_message(run), "usage": _usage(usage)}
    return named_event("message_start", {"type": "message_start", "message": message})


def _event(event: SegmentEvent) -> bytes:
    segment = event.segment
    if event.kind == "close":
        return named_event("content_block_stop", {"type": "content_block_stop", "index": segment.index})
    if event.kind == "open":
        block = _block(Segment(segment.index, segment.kind, call_id=segment.call_id, name=segment.name))
        start = {"type": "content_block_start", "index": segment.index, "content_block": block}
        return named_event("content_block_start", start)
    if segment.kind == "reasoning":
        delta = {"type": "thinking_delta", "thinking": event.text}
    elif segment.kind == "text":
        delta = {"type": "text_delta", "text": event.text}
    else:
        delta = {"type": "input_json_delta", "partial_json": event.text}
    return named_event("content_block_delta", {"type": "content_block_delta", "index": segment.index, "delta": delta})


def message_error_event(error: ApiError) -> bytes:
    """The end of a stream that failed after its first byte."""
    return named_event("error", error.anthropic_body())

"""From engine outputs to OpenAI's response object and its stream events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from dsv4_clients.proxy.chat_completion import ChatRun, chat_message
from dsv4_clients.proxy.context import ProxyContext, new_id
from dsv4_clients.proxy.errors import ApiError
from dsv4_clients.proxy.generation import collect_generations, run_generations
from dsv4_clients.proxy.schemas.responses import ResponsesRequest
from dsv4_clients.proxy.segments import Segment, SegmentEvent, SegmentTracker, segments_of
from dsv4_clients.proxy.sse import named_event
from dsv4_clients.proxy.usage import UsageTotals

_ID_PREFIXES = {"reasoning": "rs", "text": "msg", "tool": "fc"}


async def complete_response(context: ProxyContext, body: ResponsesRequest, run: ChatRun) -> dict[str, Any]:
    """The whole answer as a response object."""
    (result,) = await collect_generations(context, run.generations)
    usage = UsageTotals()
    usage.add(0, result.usage)
    segments = segments_of(chat_message(result))
    output = [_item(segment, new_id(_ID_PREFIXES[segment.kind]), "completed") for segment in segments]
    return _finished(_response(body, run), output, result.finish_reason, usage)


def _response(body: ResponsesRequest, run: ChatRun) -> dict[str, Any]:
    """The response object before anything was generated."""
    sampling = run.encoded.sampling_parameters
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {
        "id": run.id,
        "object": "response",
        "created_at": run.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": run.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "temperature": sampling.get("temperature") or 0.0,
        "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": sampling.get("top_p") or 1.0,
        "truncation": "disabled",
        "usage": None,
    }


def _finished(
    response: dict[str, Any], output: list[dict[str, Any]], finish_reason: str | None, usage: UsageTotals
) -> dict[str, Any]:
    is_cut = finish_reason == "length"
    if is_cut and output:
        output[-1]["status"] = "incomplete"
    return {
        **response,
        "status": "incomplete" if is_cut else "completed",
        "completed_at": None if is_cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def _item(segment: Segment, item_id: str, status: str) -> dict[str, Any]:
    if segment.kind == "reasoning":
        content = [{"type": "reasoning_text", "text": segment.text}] if segment.text else []
        return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}
    if segment.kind == "text":
        content = [_text_part(segment.text)] if segment.text else []
        return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": segment.call_id,
        "name": segment.name,
        "arguments": segment.text,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def response_events(context: ProxyContext, body: ResponsesRequest, run: ChatRun) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, from response.created to response.completed or response.incomplete."""
    writer = _EventWriter(_response(body, run))
    tracker = SegmentTracker()
    usage = UsageTotals()
    finish_reason = None
    outputs = run_generations(context, run.generations)
    try:
        async for _, output in outputs:
            for event in writer.start():
                yield event
            if output.usage is not None:
                usage.add(0, output.usage)
            finish_reason = output.finish_reason or finish_reason
            for segment_event in tracker.push(output.chat_delta or {}):
                for event in writer.events(segment_event):
                    yield event
    finally:
        await outputs.aclose()
    for segment_event in tracker.close():
        for event in writer.events(segment_event):
            yield event
    yield writer.finish(finish_reason, usage)


class _EventWriter:
    """Numbers the events and keeps the finished items."""

    def __init__(self, response: dict[str, Any]) -> None:
        self._response = response
        self._number = 0
        self._item_id = ""
        self._items: list[dict[str, Any]] = []

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = named_event(kind, {"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return event

    def start(self) -> Iterator[bytes]:
        """The two events before everything else; none the second time."""
        if self._number == 0:
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)

    def finish(self, finish_reason: str | None, usage: UsageTotals) -> bytes:
        """The last event, with the whole response."""
        response = _finished(self._response, self._items, finish_reason, usage)
        return self._event(f"response.{response['status']}", response=response)

    def events(self, event: SegmentEvent) -> Iterator[bytes]:
        """What one segment event means to the client."""
        if event.kind == "open":
            yield from self._open(event.segment)
        elif event.kind == "delta":
            yield self._delta(event.segment, event.text)
        else:
            yield from self._close(event.segment)

    def _place(self, segment: Segment) -> dict[str, Any]:
        place = {"item_id": self._item_id, "output_index": segment.index}
        return place if segment.kind == "tool" else {**place, "content_index": 0}

    def _open(self, segment: Segment) -> Iterator[bytes]:
        self._item_id = new_id(_ID_PREFIXES[segment.kind])
        item = _item(
            Segment(segment.index, segment.kind, "", segment.call_id, segment.name), self._item_id, "in_progress"
        )
        yield self._event("response.output_item.added", output_index=segment.index, item=item)
        if segment.kind != "tool":
            yield self._event("response.content_part.added", **self._place(segment), part=_part(segment, ""))

    def _delta(self, segment: Segment, text: str) -> bytes:
        if segment.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._place(segment), delta=text)
        if segment.kind == "text":
            return self._event("response.output_text.delta", **self._place(segment), delta=text, logprobs=[])
        return self._event("response.function_call_arguments.delta", **self._place(segment), delta=text)

    def _close(self, segment: Segment) -> Iterator[bytes]:
        place = self._place(segment)
        if segment.kind == "reasoning":
            yield self._event("response.reasoning_text.done", **place, text=segment.text)
        elif segment.kind == "text":
            yield self._event("response.output_text.done", **place, text=segment.text, logprobs=[])
        else:
            done = "response.function_call_arguments.done"
            yield self._event(done, **place, name=segment.name, arguments=segment.text)
        if segment.kind != "tool":
            yield self._event("response.content_part.done", **place, part=_part(segment, segment.text))
        item = _item(segment, self._item_id, "completed")
        self._items.append(item)
        yield self._event("response.output_item.done", output_index=segment.index, item=item)


def _part(segment: Segment, text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text} if segment.kind == "reasoning" else _text_part(text)


def response_error_event(error: ApiError) -> bytes:
    """The end of a stream that failed after its first byte."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return named_event("error", {"type": "error", "sequence_number": 0, **fields})

"""An answer as a sequence of segments: reasoning, text, tool calls, each opened, filled and closed once.

Anthropic's messages and OpenAI's responses number such segments; chat completions do not have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

SegmentKind = Literal["reasoning", "text", "tool"]


@dataclass
class Segment:
    """`text` is the reasoning, the text, or the JSON arguments of the call so far."""

    index: int
    kind: SegmentKind
    text: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class SegmentEvent:
    """`text` is what a `delta` adds."""

    kind: Literal["open", "delta", "close"]
    segment: Segment
    text: str = ""


class SegmentTracker:
    """Splits the chat deltas of one answer into segments. At most one segment is open."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._open: Segment | None = None
        self._call_index: int | None = None

    def push(self, delta: dict[str, Any]) -> Iterator[SegmentEvent]:
        """Events of one chat delta."""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            yield from self._add("reasoning", reasoning)
        if delta.get("content"):
            yield from self._add("text", delta["content"])
        for part in delta.get("tool_calls") or ():
            yield from self._add_call(part)

    def close(self) -> Iterator[SegmentEvent]:
        """Close the open segment, if there is one."""
        if self._open is not None:
            yield SegmentEvent("close", self._open)
            self._open = None

    def _add(self, kind: SegmentKind, text: str) -> Iterator[SegmentEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._start(Segment(len(self.segments), kind))
        yield self._extend(text)

    def _add_call(self, part: dict[str, Any]) -> Iterator[SegmentEvent]:
        function = part.get("function") or {}
        index = part.get("index", 0)
        if self._open is None or self._open.kind != "tool" or index != self._call_index:
            self._call_index = index
            call = Segment(len(self.segments), "tool", call_id=part.get("id") or "", name=function.get("name") or "")
            yield from self._start(call)
        if function.get("arguments"):
            yield self._extend(function["arguments"])

    def _start(self, segment: Segment) -> Iterator[SegmentEvent]:
        yield from self.close()
        self.segments.append(segment)
        self._open = segment
        yield SegmentEvent("open", segment)

    def _extend(self, text: str) -> SegmentEvent:
        assert self._open is not None
        self._open.text += text
        return SegmentEvent("delta", self._open, text)


def segments_of(message: dict[str, Any]) -> list[Segment]:
    """Segments of a finished assistant message."""
    tracker = SegmentTracker()
    calls = message.get("tool_calls") or ()
    numbered = {**message, "tool_calls": [{**call, "index": index} for index, call in enumerate(calls)]}
    for _ in tracker.push(numbered):
        pass
    return tracker.segments

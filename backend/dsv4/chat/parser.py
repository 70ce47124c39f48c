"""Output of the model to OpenAI chat deltas, once per engine step."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsv4.chat.detokenizer import OutputStream
from dsv4.chat.markup import MalformedOutputError, MarkupMachine, State
from dsv4.chat.output_format import OutputFormat
from dsv4.chat.protocol import DSML, END_OF_SENTENCE, THINK_END, THINK_START
from dsv4.chat.tags import DSML_MARK, SENTINEL_SPELLING, THINK_END_MARK, THINK_START_MARK
from dsv4.chat.tokenizer import ChatTokenizer

Delta = dict[str, Any]
"""An OpenAI delta: role, content, reasoning_content with its twin reasoning, tool_calls."""

_START_STATES = {"content": State.CONTENT, "reasoning": State.REASONING, "tool_block": State.BLOCK}


class ChatStep(NamedTuple):
    """Result of one step. ``token_count`` of the step's tokens belong to the output.

    With ``stop`` a stop string was completed by the last of them, with ``error`` the output is invalid; after either
    the request ends.
    """

    deltas: list[Delta]
    token_count: int = 0
    stop: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class ChatEnd:
    """Last deltas, and the finish reason to report: ``error`` when the output is invalid, which ``error`` explains."""

    deltas: list[Delta]
    finish_reason: str
    error: str | None = None


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex}"


class ChatParser:
    """Splits one output into reasoning, content and tool calls.

    Fed with token ids, only real control tokens count as markers; the same characters spelled with ordinary tokens are
    text. Fed with text (``push_text``), spelled markers count, since nothing tells them apart. The joined deltas do not
    depend on how the output is cut into steps.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        tokenizer: ChatTokenizer | None = None,
        *,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        call_id_factory: Callable[[], str] = new_call_id,
    ) -> None:
        """``tokenizer`` is needed for ``push``; without one only text can be parsed."""
        self._deltas = _DeltaBuilder(output_format.include_reasoning, call_id_factory)
        self._machine = MarkupMachine(
            self._deltas,
            start=_START_STATES[output_format.start_state],
            tools=bool(output_format.tools),
            call_limit=_call_limit(output_format),
        )
        self._text_marks = _TextMarks()
        self._stream: OutputStream | None = None
        self._reasoning_tokens = 0
        self._error: str | None = None
        self._stop: str | None = None
        self._markers: frozenset[int] = frozenset()
        if tokenizer is not None:
            sentinels = {
                tokenizer.token_id(DSML): DSML_MARK,
                tokenizer.token_id(THINK_START): THINK_START_MARK,
                tokenizer.token_id(THINK_END): THINK_END_MARK,
            }
            self._markers = frozenset(sentinels) | tokenizer.special_ids
            self._stream = OutputStream(
                tokenizer,
                stop_strings,
                include_stop=include_stop,
                sentinels=sentinels,
                spelling=SENTINEL_SPELLING,
            )

    @classmethod
    def from_output_format(
        cls,
        output_format: dict[str, Any],
        tokenizer: ChatTokenizer,
        *,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
    ) -> ChatParser:
        """Build from the JSON object of the encode step. Raises INVALID_ARGUMENT for a bad one."""
        return cls(
            OutputFormat.from_dict(output_format), tokenizer, stop_strings=stop_strings, include_stop=include_stop
        )

    @property
    def reasoning_tokens(self) -> int:
        """Tokens inside reasoning so far, markers excluded, hidden reasoning included."""
        return self._reasoning_tokens

    def push(self, token_ids: Sequence[int]) -> ChatStep:
        """Add the tokens of one step. Never raises for anything a model can generate."""
        if self._stream is None:
            raise ValueError("this parser was built without a tokenizer")
        if self._error is not None or self._stop is not None:
            return ChatStep([], error=self._error, stop=self._stop)
        count = 0
        for token in token_ids:
            step = self._stream.push((token,))
            count += step.token_count
            if self._machine.state is State.REASONING and token not in self._markers:
                self._reasoning_tokens += 1
            self._feed(step.pieces)
            self._stop = step.stop
            if self._error is not None or self._stop is not None:
                break
        return ChatStep(self._deltas.take(), count, self._stop, self._error)

    def push_text(self, text: str) -> ChatStep:
        """Add text instead of tokens; its spelled markers count."""
        if self._error is None:
            self._feed((self._text_marks.push(text),))
        return ChatStep(self._deltas.take(), error=self._error)

    def finish(self, reason: str) -> ChatEnd:
        """End the output for the engine's reason: ``stop``, ``length``, ``abort`` or another.

        ``stop`` becomes ``tool_calls`` when at least one call is complete, and ``error`` when the model stopped inside
        a call; every other reason stays as it is.
        """
        if self._error is None:
            if self._stream is not None:
                self._feed(self._stream.finish())
            self._feed((self._text_marks.finish(),))
        if self._error is None:
            natural = reason == "stop" and self._stop is None
            try:
                self._machine.finish(natural=natural)
            except MalformedOutputError as error:
                self._error = str(error)
        deltas = self._deltas.take(final=True)
        if self._error is not None:
            return ChatEnd(deltas, "error" if reason == "stop" else reason, self._error)
        if reason == "stop" and self._machine.reported_calls and not self._deltas.call_is_open:
            return ChatEnd(deltas, "tool_calls")
        return ChatEnd(deltas, reason)

    def _feed(self, pieces: Sequence[str]) -> None:
        try:
            for piece in pieces:
                if piece:
                    self._machine.feed(piece)
        except MalformedOutputError as error:
            self._error = str(error)


def _call_limit(output_format: OutputFormat) -> int | None:
    if output_format.tool_choice == "none":
        return 0
    return None if output_format.parallel_tool_calls else 1


class _DeltaBuilder:
    """Collects the machine's events of a step as deltas, adjacent ones of a kind merged."""

    def __init__(self, include_reasoning: bool, call_id_factory: Callable[[], str]) -> None:
        self.call_is_open = False
        self._include_reasoning = include_reasoning
        self._new_call_id = call_id_factory
        self._call_index = -1
        self._has_role = False
        self._deltas: list[Delta] = []
        self._kind = ""
        self._parts: list[str] = []

    def reasoning(self, text: str) -> None:
        if self._include_reasoning:
            self._add("reasoning", text)

    def content(self, text: str) -> None:
        self._add("content", text)

    def call_started(self, name: str) -> None:
        self._close()
        self._call_index += 1
        self.call_is_open = True
        function = {"name": name, "arguments": ""}
        entry = {"index": self._call_index, "id": self._new_call_id(), "type": "function", "function": function}
        self._deltas.append({"tool_calls": [entry]})

    def arguments(self, text: str) -> None:
        self._add("arguments", text)

    def call_finished(self) -> None:
        self.call_is_open = False

    def take(self, *, final: bool = False) -> list[Delta]:
        """The deltas since the last call. The first delta of an output carries the role."""
        self._close()
        deltas, self._deltas = self._deltas, []
        if not self._has_role and (deltas or final):
            self._has_role = True
            first = deltas[0] if deltas else {"content": ""}
            return [{"role": "assistant", **first}, *deltas[1:]]
        return deltas

    def _add(self, kind: str, text: str) -> None:
        if kind != self._kind:
            self._close()
            self._kind = kind
        self._parts.append(text)

    def _close(self) -> None:
        text = "".join(self._parts)
        kind, self._kind, self._parts = self._kind, "", []
        if not text:
            return
        if kind == "content":
            self._deltas.append({"content": text})
        elif kind == "reasoning":
            self._deltas.append({"reasoning_content": text, "reasoning": text})
        else:
            self._deltas.append({"tool_calls": [{"index": self._call_index, "function": {"arguments": text}}]})


class _TextMarks:
    """Turns spelled markers in text into sentinels, holding back what may become one."""

    _MARKS = {DSML: DSML_MARK, THINK_START: THINK_START_MARK, THINK_END: THINK_END_MARK, END_OF_SENTENCE: ""}  # noqa: RUF012
    _PATTERN = re.compile("|".join(map(re.escape, _MARKS)))
    _SURROGATES = re.compile("[\ud800-\udfff]")

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + self._SURROGATES.sub("\ufffd", text)
        marked = self._PATTERN.sub(lambda match: self._MARKS[match[0]], text)
        longest = max(map(len, self._MARKS)) - 1
        for size in range(min(longest, len(marked)), 0, -1):
            tail = marked[-size:]
            if any(mark.startswith(tail) for mark in self._MARKS):
                self._held = tail
                return marked[:-size]
        self._held = ""
        return marked

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class MessageBuilder:
    """Joins deltas into the message of a response that is not streamed."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []

    def add(self, deltas: Sequence[Delta]) -> None:
        """Append the deltas of a step."""
        for delta in deltas:
            if delta.get("content"):
                self._content.append(delta["content"])
            if delta.get("reasoning_content"):
                self._reasoning.append(delta["reasoning_content"])
            for entry in delta.get("tool_calls", ()):
                if entry["index"] == len(self._calls):
                    self._calls.append(entry)
                    self._arguments.append([])
                self._arguments[entry["index"]].append(entry["function"]["arguments"])

    def message(self) -> dict[str, Any]:
        """The message: content is null beside calls without text; reasoning appears under both names in use."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["function"]["name"], "arguments": "".join(parts)},
                }
                for call, parts in zip(self._calls, self._arguments, strict=True)
            ]
        return message

"""State machine over an output: reasoning, content and the calls in its markup, as soon as each is certain."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Protocol

from dsv4.chat.fields import parse_json
from dsv4.chat.tags import (
    DSML_MARK,
    PARAMETER_CLOSE_TAG,
    THINK_END_MARK,
    THINK_START_MARK,
    Tag,
    TagKind,
    read_tag,
    spell,
)
from dsv4.errors import RequestError


class MalformedOutputError(Exception):
    """The model wrote a call that cannot be read without inventing or losing an argument."""


class MarkupEvents(Protocol):
    """Receives what the machine finds, in order."""

    def reasoning(self, text: str) -> None:
        """More reasoning."""

    def content(self, text: str) -> None:
        """More of the answer."""

    def call_started(self, name: str) -> None:
        """A call begins."""

    def arguments(self, text: str) -> None:
        """The next piece of the JSON text of the current call's arguments."""

    def call_finished(self) -> None:
        """The current call is complete, its arguments one JSON object."""


class State(enum.Enum):
    """``BLOCK`` is anywhere in or after a block of calls but outside a call, ``DISCARD`` swallows everything."""

    CONTENT = enum.auto()
    REASONING = enum.auto()
    BLOCK = enum.auto()
    INVOKE = enum.auto()
    VALUE = enum.auto()
    DISCARD = enum.auto()


_THINK_MARKS = re.compile(f"[{THINK_START_MARK}{THINK_END_MARK}]")
_FREE_TEXT_MARKS = re.compile(f"[{THINK_START_MARK}{THINK_END_MARK}]|</?{DSML_MARK}")
_TAG_MARK = re.compile(f"</?{DSML_MARK}")
_TAG_HEAD_WITH_NAME = re.compile(f"<{DSML_MARK}[A-Za-z_]")


class MarkupMachine:
    """Feed it text in which control tokens are sentinels (see ``dsv4.chat.tags``).

    With ``tools`` no tag ever reaches content or reasoning; without, tags are ordinary text. ``call_limit`` calls are
    reported and the rest is swallowed (None: no limit).
    """

    def __init__(
        self, events: MarkupEvents, *, start: State, tools: bool = False, call_limit: int | None = None
    ) -> None:
        self.state = start
        self._events = events
        self._tools = tools
        self._call_limit = call_limit
        self._buffer = ""
        self._block_is_open = start is State.BLOCK
        self._calls_in_block = 0
        self._call_count = 0
        self._finished_calls = 0
        self._tails = {State.CONTENT: "", State.REASONING: ""}
        self._keys: set[str] = set()
        self._body: list[str] = []
        self._value_key = ""
        self._value_is_string = False
        self._value_parts: list[str] = []
        self._steps: dict[State, Callable[[], bool]] = {
            State.CONTENT: self._read_free_text,
            State.REASONING: self._read_free_text,
            State.BLOCK: self._read_block,
            State.INVOKE: self._read_invoke,
            State.VALUE: self._read_value,
            State.DISCARD: self._discard,
        }

    @property
    def reported_calls(self) -> int:
        """Calls that were finished and reported."""
        return self._finished_calls

    def feed(self, text: str) -> None:
        """Read on. Raises MalformedOutputError, after which nothing more must be fed."""
        self._buffer += text
        try:
            while self._buffer and self._steps[self.state]():
                pass
        except MalformedOutputError:
            if not self._swallows():
                raise
            self.state, self._buffer = State.DISCARD, ""

    def finish(self, *, natural: bool) -> None:
        """The output ends. ``natural`` means that the model ended it; anything else cut it off.

        Raises MalformedOutputError when the model stopped inside a call that cannot be completed without guessing.
        """
        try:
            self._finish(natural)
        except MalformedOutputError:
            if not self._swallows():
                raise
        self._buffer = ""

    # Reasoning and content

    def _read_free_text(self) -> bool:
        buffer = self._buffer
        mark = (_FREE_TEXT_MARKS if self._tools else _THINK_MARKS).search(buffer)
        if mark is None:
            keep = _held_tail(buffer) if self._tools else 0
            self._publish(buffer[: len(buffer) - keep])
            self._buffer = buffer[len(buffer) - keep :]
            return False
        before, rest = buffer[: mark.start()], buffer[mark.start() :]
        if rest[0] in (THINK_START_MARK, THINK_END_MARK):
            self._publish(before)
            self.state = State.REASONING if rest[0] == THINK_START_MARK else State.CONTENT
            self._buffer = rest[1:]
            return True
        # Line breaks directly before a block belong to its markup, so they wait for the tag to be known.
        text = before.rstrip("\n")
        tag = read_tag(rest)
        if tag.kind is TagKind.PARTIAL:
            self._publish(text)
            self._buffer = before[len(text) :] + rest
            return False
        if tag.kind in (TagKind.BLOCK_OPEN, TagKind.INVOKE_OPEN):
            self._publish(text)
            self.state = State.BLOCK
            self._buffer = rest
            return True
        self._publish(before)
        self._buffer = rest[tag.length :]
        if tag.kind in (TagKind.MALFORMED, TagKind.PARAMETER_OPEN):
            raise MalformedOutputError("a call's tag outside a call cannot be read")
        return True

    def _publish(self, text: str) -> None:
        """Publish text; a lone DSML token does not join a ``<`` before a dropped marker to what reads like a tag."""
        if text.startswith(DSML_MARK) and self._tails[self.state].endswith(("<", "</")) and self._tools:
            text = text.lstrip(DSML_MARK)
        if not text:
            return
        self._tails[self.state] = (self._tails[self.state] + text[-2:])[-2:]
        if self.state is State.REASONING:
            self._events.reasoning(spell(text))
        else:
            self._events.content(spell(text))

    # Between calls

    def _read_block(self) -> bool:
        mark = _TAG_MARK.search(self._buffer)
        if mark is None:
            keep = _held_tag_start(self._buffer)
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._buffer = self._buffer[mark.start() :]
        tag = read_tag(self._buffer)
        if tag.kind is TagKind.PARTIAL:
            return False
        self._buffer = self._buffer[tag.length :]
        if tag.kind is TagKind.BLOCK_OPEN:
            self._block_is_open, self._calls_in_block = True, 0
        elif tag.kind is TagKind.BLOCK_CLOSE:
            self._block_is_open = False
        elif tag.kind is TagKind.INVOKE_OPEN:
            self._start_call(tag)
        elif tag.kind in (TagKind.MALFORMED, TagKind.PARAMETER_OPEN):
            raise MalformedOutputError("a call's tag cannot be read")
        return True

    # Inside a call

    def _read_invoke(self) -> bool:
        mark = _TAG_MARK.search(self._buffer)
        if mark is None:
            keep = _held_tag_start(self._buffer)
            self._add_body(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._add_body(self._buffer[: mark.start()])
        self._buffer = self._buffer[mark.start() :]
        tag = read_tag(self._buffer)
        if tag.kind is TagKind.PARTIAL:
            return False
        if tag.kind is TagKind.PARAMETER_OPEN:
            self._start_value(tag)
        elif tag.kind in (TagKind.INVOKE_CLOSE, TagKind.BLOCK_CLOSE):
            self._finish_call()
            self._block_is_open = self._block_is_open and tag.kind is TagKind.INVOKE_CLOSE
        elif tag.kind is TagKind.INVOKE_OPEN:
            self._finish_call()
            self._start_call(tag)
        elif tag.kind is not TagKind.PARAMETER_CLOSE:
            raise MalformedOutputError("a tag inside a call cannot be read")
        self._buffer = self._buffer[tag.length :]
        return True

    def _add_body(self, text: str) -> None:
        if text and (self._body or not text.isspace()):
            self._body.append(text)

    def _start_call(self, tag: Tag) -> None:
        if not tag.name:
            raise MalformedOutputError("a call has no name")
        self._call_count += 1
        self._calls_in_block += 1
        self._keys = set()
        self._body = []
        if not self._swallows_call():
            self._events.call_started(tag.name)
        self.state = State.INVOKE
        if tag.self_closing:
            self._finish_call()

    def _finish_call(self) -> None:
        body = spell("".join(self._body)).strip()
        if body:
            self._emit_arguments(self._check_body(body))
        else:
            self._emit_arguments("}" if self._keys else "{}")
        self.state = State.BLOCK
        if not self._swallows_call():
            self._finished_calls += 1
            self._events.call_finished()

    def _check_body(self, body: str) -> str:
        """Some outputs write the arguments as one JSON object; that is as clear as parameters."""
        try:
            if not self._keys and isinstance(parse_json(body, "arguments"), dict):
                return body
        except RequestError:
            pass
        raise MalformedOutputError("a call contains text outside its parameters")

    # Inside a value

    def _start_value(self, tag: Tag) -> None:
        if "".join(self._body).strip():
            raise MalformedOutputError("a call contains text outside its parameters")
        if tag.name in self._keys:
            raise MalformedOutputError(f"parameter {tag.name!r} is given twice")
        self._value_key = ("{" if not self._keys else ", ") + encode_basestring(tag.name) + ": "
        self._keys.add(tag.name)
        self._value_is_string = tag.is_string
        self._value_parts = []
        if tag.is_string:
            self._emit_arguments(self._value_key + '"')
        self.state = State.VALUE

    def _read_value(self) -> bool:
        buffer = self._buffer
        mark = _TAG_MARK.search(buffer)
        if mark is None:
            keep = _held_tag_start(buffer)
            self._add_value(buffer[: len(buffer) - keep])
            self._buffer = buffer[len(buffer) - keep :]
            return False
        self._add_value(buffer[: mark.start()])
        rest = buffer[mark.start() :]
        if rest.startswith(PARAMETER_CLOSE_TAG):
            self._finish_value()
            self._buffer = rest[len(PARAMETER_CLOSE_TAG) :]
            return True
        self._buffer = rest
        if PARAMETER_CLOSE_TAG.startswith(rest):
            return False
        if rest[1] == DSML_MARK and f"<{DSML_MARK}parameter".startswith(rest[:11]):
            # A whole opening tag of the next parameter ends a value that was not closed.
            tag = read_tag(rest)
            if tag.kind is TagKind.PARTIAL:
                return False
            if tag.kind is TagKind.PARAMETER_OPEN:
                self._finish_value()
                return True
        length = mark.end() - mark.start()
        self._add_value(rest[:length])
        self._buffer = rest[length:]
        return True

    def _add_value(self, text: str) -> None:
        if not text:
            return
        text = spell(text)
        if self._value_is_string:
            self._emit_arguments(encode_basestring(text)[1:-1])
        else:
            self._value_parts.append(text)

    def _finish_value(self) -> None:
        self.state = State.INVOKE
        if self._value_is_string:
            self._emit_arguments('"')
            return
        value = "".join(self._value_parts).strip()
        try:
            parse_json(value, "value")
        except RequestError as error:
            raise MalformedOutputError(f"the value of a parameter {error.message.removeprefix('value: ')}") from None
        self._emit_arguments(self._value_key + value)

    # Everywhere

    def _discard(self) -> bool:
        self._buffer = ""
        return False

    def _swallows(self) -> bool:
        """True when whatever is read from here on would not be reported anyway."""
        if self._call_limit is None:
            return False
        inside = self.state in (State.INVOKE, State.VALUE)
        return self._call_count - inside >= self._call_limit

    def _swallows_call(self) -> bool:
        return self._call_limit is not None and self._call_count > self._call_limit

    def _emit_arguments(self, text: str) -> None:
        if not self._swallows_call():
            self._events.arguments(text)

    def _finish(self, natural: bool) -> None:
        cut_tag = _TAG_HEAD_WITH_NAME.search(self._buffer)
        if self.state in (State.CONTENT, State.REASONING):
            if natural and cut_tag:
                raise MalformedOutputError("the output ends inside a tag")
            if not (self._tools and DSML_MARK in self._buffer):
                self._publish(self._buffer)
        if not natural or self.state not in (State.BLOCK, State.INVOKE, State.VALUE):
            return
        if self.state is State.VALUE:
            raise MalformedOutputError("the output ends inside the value of a parameter")
        if cut_tag:
            raise MalformedOutputError("the output ends inside a tag")
        if self.state is State.BLOCK and self._block_is_open and not self._calls_in_block:
            raise MalformedOutputError("the output ends in a block of calls without a call")
        if self.state is State.INVOKE:
            if not self._keys and not self._body:
                raise MalformedOutputError("the output ends at the start of a call")
            self._finish_call()


def _held_tail(text: str) -> int:
    """Length of the end of ``text`` that may belong to a tag: line breaks, then the start of the tag."""
    keep = _held_tag_start(text)
    end = len(text) - keep
    return len(text) - len(text[:end].rstrip("\n"))


def _held_tag_start(text: str) -> int:
    return 2 if text.endswith("</") else 1 if text.endswith("<") else 0

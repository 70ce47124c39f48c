"""The message list of a chat request: validation, and merging into the turns that the prompt renders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dsv4.chat.fields import (
    Json,
    dump_json,
    join_path,
    read_array,
    read_boolean,
    read_choice,
    read_object,
    read_string,
    refuse_unknown,
    type_name,
)
from dsv4.chat.protocol import PARAMETER_CLOSE, TOOL_RESULT_CLOSE
from dsv4.chat.tools import read_call_arguments
from dsv4.errors import invalid_argument

ROLES = ("system", "user", "developer", "assistant", "latest_reminder", "tool")

# What clients echo from a response into the history, or send for other services. It has no place in the prompt.
_IGNORED_FIELDS = ("name", "refusal", "annotations", "audio", "function_call", "id", "index", "type", "status")
_COMMON_FIELDS = ("role", "content")
_ASSISTANT_FIELDS = ("tool_calls", "reasoning_content", "reasoning", "reasoning_details", "prefix")

PART_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Call:
    """A call in the history. ``parameters`` are (name, value text, is string) in the order of the arguments."""

    id: str
    name: str
    parameters: tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True)
class Block:
    """A part of a user turn: the client's text, or the result of the call ``call_id``."""

    text: str
    call_id: str | None = None


@dataclass(frozen=True)
class Turn:
    """One message as the prompt shows it; runs of user and tool messages are one turn of several blocks."""

    role: Literal["system", "user", "developer", "assistant", "latest_reminder"]
    content: str = ""
    blocks: tuple[Block, ...] = ()
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    prefix: bool = False

    @property
    def is_user_side(self) -> bool:
        """True for the turns that the model answers."""
        return self.role in ("user", "developer")


def read_messages(value: Json, path: str = "messages") -> list[Turn]:
    """Validate the message list and merge it into turns.

    Raises INVALID_ARGUMENT, naming the path of the field, for every message that has no rendering.
    """
    entries = read_array(value, path)
    if not entries:
        raise invalid_argument(path, "must contain at least one message")
    reader = _MessageReader()
    for index, entry in enumerate(entries):
        reader.read(entry, f"{path}[{index}]", is_last=index == len(entries) - 1)
    return _merge_user_turns(reader.turns)


class _MessageReader:
    """Reads one message after the other, keeping what tool results refer to."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._open_calls: set[str] = set()
        self._answered_calls: set[str] = set()

    def read(self, value: Json, path: str, *, is_last: bool) -> None:
        message = read_object(value, path)
        role = read_choice(message.get("role"), join_path(path, "role"), ROLES)
        fields: tuple[str, ...] = _COMMON_FIELDS + _IGNORED_FIELDS
        if role == "assistant":
            fields += _ASSISTANT_FIELDS
        elif role == "tool":
            fields += ("tool_call_id",)
        refuse_unknown({key: item for key, item in message.items() if item is not None}, path, fields)
        if role == "assistant":
            self.turns.append(self._read_assistant(message, path, is_last))
        elif role == "tool":
            self.turns.append(self._read_tool_result(message, path))
        else:
            self.turns.append(_read_plain(message, role, path))

    def _read_assistant(self, message: dict[str, Json], path: str, is_last: bool) -> Turn:
        prefix = _read_prefix(message.get("prefix"), join_path(path, "prefix"), is_last)
        calls = self._read_calls(message.get("tool_calls"), join_path(path, "tool_calls"))
        reasoning = _read_reasoning(message, path)
        content_path = join_path(path, "content")
        if message.get("content") is not None:
            content = read_content(message["content"], content_path)
        elif calls or (prefix and reasoning):
            content = ""
        else:
            raise invalid_argument(content_path, "must be set in an assistant message without tool_calls")
        if prefix and calls:
            raise invalid_argument(join_path(path, "prefix"), "cannot continue a message that has tool_calls")
        return Turn("assistant", content, reasoning=reasoning, calls=calls, prefix=prefix)

    def _read_calls(self, value: Json, path: str) -> tuple[Call, ...]:
        if value is None:
            return ()
        calls = [_read_call(entry, f"{path}[{index}]") for index, entry in enumerate(read_array(value, path))]
        ids: set[str] = set()
        for index, call in enumerate(calls):
            if call.id in ids:
                raise invalid_argument(f"{path}[{index}].id", f"{call.id!r} is used twice in this message")
            ids.add(call.id)
        if calls:
            self._open_calls, self._answered_calls = ids, set()
        return tuple(calls)

    def _read_tool_result(self, message: dict[str, Json], path: str) -> Turn:
        id_path = join_path(path, "tool_call_id")
        if message.get("tool_call_id") is None:
            raise invalid_argument(id_path, "must be set in a tool message")
        call_id = read_string(message["tool_call_id"], id_path)
        if call_id not in self._open_calls:
            raise invalid_argument(id_path, f"{call_id!r} is not a call of the preceding assistant message")
        if call_id in self._answered_calls:
            raise invalid_argument(id_path, f"{call_id!r} already has a result")
        self._answered_calls.add(call_id)
        content_path = join_path(path, "content")
        content = read_content(message.get("content"), content_path)
        if TOOL_RESULT_CLOSE in content:
            raise invalid_argument(content_path, f"must not contain {TOOL_RESULT_CLOSE}")
        return Turn("user", blocks=(Block(content, call_id),))


def _read_plain(message: dict[str, Json], role: str, path: str) -> Turn:
    content_path = join_path(path, "content")
    content = read_content(message.get("content"), content_path)
    if role == "user":
        return Turn("user", blocks=(Block(content),))
    if role == "developer":
        if not content:
            raise invalid_argument(content_path, "must not be empty in a developer message")
        return Turn("developer", content)
    return Turn("system" if role == "system" else "latest_reminder", content)


def read_content(value: Json, path: str) -> str:
    """Text of a message: a string, or a list of text parts, which join as paragraphs."""
    if isinstance(value, str):
        return read_string(value, path)
    if not isinstance(value, (list, tuple)):
        raise invalid_argument(path, f"must be a string or an array of text parts, not {type_name(value)}")
    texts: list[str] = []
    for index, entry in enumerate(value):
        part_path = f"{path}[{index}]"
        part = read_object(entry, part_path)
        kind = part.get("type")
        if kind != "text":
            shown = repr(kind) if isinstance(kind, str) else type_name(kind)
            raise invalid_argument(join_path(part_path, "type"), f"only text parts are supported, not {shown}")
        refuse_unknown(part, part_path, ("type", "text", "cache_control"))
        texts.append(read_string(part.get("text"), join_path(part_path, "text")))
    return PART_SEPARATOR.join(texts)


def _read_prefix(value: Json, path: str, is_last: bool) -> bool:
    prefix = value is not None and read_boolean(value, path)
    if prefix and not is_last:
        raise invalid_argument(path, "is allowed only in the last message")
    return prefix


def _read_reasoning(message: dict[str, Json], path: str) -> str | None:
    """Both field names are in use; our own answers carry both with the same text."""
    for name in ("reasoning_content", "reasoning"):
        if message.get(name) is not None:
            return read_string(message[name], join_path(path, name))
    return None


def _read_call(value: Json, path: str) -> Call:
    entry = read_object(value, path)
    refuse_unknown(entry, path, ("id", "type", "function", "index"))
    if entry.get("type", "function") != "function":
        raise invalid_argument(join_path(path, "type"), f"must be 'function', not {entry['type']!r}")
    call_id = read_string(entry.get("id"), join_path(path, "id"))
    function_path = join_path(path, "function")
    function = read_object(entry.get("function"), function_path)
    refuse_unknown(function, function_path, ("name", "arguments"))
    name_path = join_path(function_path, "name")
    name = read_string(function.get("name"), name_path)
    if not name or any(delimiter in name for delimiter in '"<>\n'):
        raise invalid_argument(name_path, f'must not be empty or contain any of " < > or a line break, not {name!r}')
    arguments_path = join_path(function_path, "arguments")
    arguments = read_call_arguments(function.get("arguments"), arguments_path)
    parameters = []
    for key, argument in arguments.items():
        is_string = isinstance(argument, str)
        text = argument if is_string else dump_json(argument, arguments_path)
        if not is_string and PARAMETER_CLOSE in text:
            raise invalid_argument(arguments_path, f"parameter {key!r} must not contain {PARAMETER_CLOSE}")
        parameters.append((read_string(key, arguments_path), read_string(text, arguments_path), is_string))
    return Call(call_id, name, tuple(parameters))


def _merge_user_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Join consecutive user texts and tool results into one turn, results in the order of their calls."""
    merged: list[Turn] = []
    call_order: dict[str, int] = {}
    for turn in turns:
        if turn.role == "user" and merged and merged[-1].role == "user":
            merged[-1] = replace(merged[-1], blocks=merged[-1].blocks + turn.blocks)
            continue
        if merged and merged[-1].role == "user":
            merged[-1] = _order_results(merged[-1], call_order)
        if turn.calls:
            call_order = {call.id: position for position, call in enumerate(turn.calls)}
        merged.append(turn)
    if merged[-1].role == "user":
        merged[-1] = _order_results(merged[-1], call_order)
    return merged


def _order_results(turn: Turn, call_order: dict[str, int]) -> Turn:
    """Put the results of a turn into call order; texts keep their places."""
    results = [block for block in turn.blocks if block.call_id is not None]
    if len(results) < 2:
        return turn
    ordered = iter(sorted(results, key=lambda block: call_order.get(block.call_id or "", 0)))
    return replace(turn, blocks=tuple(block if block.call_id is None else next(ordered) for block in turn.blocks))

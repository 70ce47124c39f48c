"""Function tools and tool_choice of a chat request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dsv4.chat.fields import (
    Json,
    dump_json,
    join_path,
    parse_json,
    read_array,
    read_boolean,
    read_object,
    read_string,
    refuse_unknown,
    type_name,
)
from dsv4.chat.protocol import PARAMETER_CLOSE
from dsv4.errors import invalid_argument

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

ChoiceMode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class Tool:
    """One declared function. ``schema_line`` is its line in the tools block of the prompt."""

    name: str
    description: str | None
    parameters: dict[str, Json] | None
    strict: bool
    schema_line: str


@dataclass(frozen=True)
class ToolChoice:
    """``name`` is set only when one function is demanded (mode ``named``)."""

    mode: ChoiceMode
    name: str | None = None

    @property
    def demands_call(self) -> bool:
        """True when the answer must be a call."""
        return self.mode in ("required", "named")


def read_tools(value: Json, path: str = "tools") -> tuple[Tool, ...]:
    """Validate the ``tools`` field. A missing field or null means no tools.

    Raises INVALID_ARGUMENT for an empty list, anything but function tools, bad or repeated names, and
    ``strict`` with a schema outside the strict subset.
    """
    if value is None:
        return ()
    entries = read_array(value, path)
    if not entries:
        raise invalid_argument(path, "must not be empty; leave the field out to offer no tools")
    tools: list[Tool] = []
    seen: set[str] = set()
    for index, entry in enumerate(entries):
        tool = _read_tool(entry, f"{path}[{index}]")
        if tool.name in seen:
            raise invalid_argument(f"{path}[{index}].function.name", f"{tool.name!r} is declared twice")
        seen.add(tool.name)
        tools.append(tool)
    return tuple(tools)


def _read_tool(value: Json, path: str) -> Tool:
    entry = read_object(value, path)
    kind = entry.get("type")
    if kind != "function":
        shown = repr(kind) if isinstance(kind, str) else type_name(kind)
        raise invalid_argument(join_path(path, "type"), f"must be 'function', not {shown}")
    refuse_unknown(entry, path, ("type", "function"))
    function_path = join_path(path, "function")
    function = read_object(entry.get("function"), function_path)
    refuse_unknown(function, function_path, ("name", "description", "parameters", "strict"))

    name_path = join_path(function_path, "name")
    name = read_string(function.get("name"), name_path)
    if not TOOL_NAME.fullmatch(name):
        raise invalid_argument(name_path, f"must match [A-Za-z0-9_-]{{1,64}}, not {name!r}")
    description = function.get("description")
    if description is not None:
        description = read_string(description, join_path(function_path, "description"))
    parameters = function.get("parameters")
    parameters_path = join_path(function_path, "parameters")
    if parameters is not None:
        parameters = read_object(parameters, parameters_path)
    strict_value = function.get("strict")
    strict = strict_value is not None and read_boolean(strict_value, join_path(function_path, "strict"))
    if strict and parameters is not None:
        check_strict_schema(parameters, parameters_path)

    schema: dict[str, Json] = {"name": name}
    if description is not None:
        schema["description"] = description
    if parameters is not None:
        schema["parameters"] = parameters
    return Tool(name, description, parameters, strict, dump_json(schema, function_path))


def check_strict_schema(schema: Json, path: str) -> None:
    """Refuse a schema outside OpenAI's strict subset: closed objects whose every property is required."""
    if isinstance(schema, bool):
        return
    node = read_object(schema, path)
    kinds = node.get("type")
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds) or "properties" in node
    if is_object:
        properties = read_object(node.get("properties", {}), join_path(path, "properties"))
        if node.get("additionalProperties") is not False:
            raise invalid_argument(
                join_path(path, "additionalProperties"), "must be false in every object of a strict schema"
            )
        required = read_array(node.get("required", []), join_path(path, "required"))
        missing = [name for name in properties if name not in required]
        if missing:
            raise invalid_argument(
                join_path(path, "required"), f"must list every property of a strict schema; {missing[0]!r} is missing"
            )
        for name, child in properties.items():
            check_strict_schema(child, f"{path}.properties.{name}")
    if "items" in node:
        check_strict_schema(node["items"], join_path(path, "items"))
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for index, child in enumerate(read_array(node.get(key, []), join_path(path, key))):
            check_strict_schema(child, f"{path}.{key}[{index}]")
    for key in ("$defs", "definitions"):
        for name, child in read_object(node.get(key, {}), join_path(path, key)).items():
            check_strict_schema(child, f"{path}.{key}.{name}")


def read_tool_choice(value: Json, tools: Sequence[Tool], path: str = "tool_choice") -> ToolChoice:
    """Validate ``tool_choice`` against the declared tools. Missing means ``auto`` with tools, ``none`` without."""
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if value == "none":
        return ToolChoice("none")
    if isinstance(value, dict):
        choice = _read_named_choice(value, path)
    elif value in ("auto", "required"):
        choice = ToolChoice(value)
    else:
        shown = repr(value) if isinstance(value, str) else type_name(value)
        raise invalid_argument(path, f"must be 'none', 'auto', 'required' or a named function, not {shown}")
    if not tools:
        raise invalid_argument(path, "needs tools, and the request declares none")
    if choice.name is not None and all(tool.name != choice.name for tool in tools):
        raise invalid_argument(f"{path}.function.name", f"{choice.name!r} is not among the declared tools")
    return choice


def _read_named_choice(value: dict[str, Json], path: str) -> ToolChoice:
    if value.get("type") != "function":
        raise invalid_argument(join_path(path, "type"), f"must be 'function', not {value.get('type')!r}")
    refuse_unknown(value, path, ("type", "function"))
    function_path = join_path(path, "function")
    function = read_object(value.get("function"), function_path)
    refuse_unknown(function, function_path, ("name",))
    return ToolChoice("named", read_string(function.get("name"), join_path(function_path, "name")))


def read_call_arguments(text: Json, path: str) -> dict[str, Json]:
    """Parse the arguments of a call in the history: the text of one JSON object.

    Raises INVALID_ARGUMENT for anything else, for a string value that contains the closing tag of a parameter,
    and for names that hold the delimiters of a tag.
    """
    arguments = parse_json(read_string(text, path), path)
    if not isinstance(arguments, dict):
        raise invalid_argument(path, f"must be the text of a JSON object, not of a {type_name(arguments)}")
    for name, value in arguments.items():
        if any(delimiter in name for delimiter in '"<>'):
            raise invalid_argument(path, f'parameter name {name!r} must not contain any of " < >')
        if isinstance(value, str) and PARAMETER_CLOSE in value:
            raise invalid_argument(path, f"parameter {name!r} must not contain {PARAMETER_CLOSE}")
    return arguments

"""Constraints on an output as xgrammar structural tags: demanded and strict calls, JSON answers, after the reasoning.

A structural tag describes text, but the parser counts only real control tokens. ``anchor_control_tokens`` closes that
gap: in the EBNF that xgrammar makes of a tag it replaces the spelled DSML token by the token itself, so that a
grammatical output is always one that the parser reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4.chat.fields import (
    Json,
    join_path,
    parse_json,
    read_array,
    read_boolean,
    read_object,
    read_string,
    refuse_unknown,
)
from dsv4.chat.protocol import DSML, INVOKE_CLOSE, THINK_END, THINK_START, TOOL_CALLS_CLOSE, TOOL_CALLS_OPEN
from dsv4.chat.response_format import ResponseFormat
from dsv4.chat.tools import Tool, ToolChoice
from dsv4.errors import invalid_argument

Format = dict[str, Any]
"""A format of an xgrammar structural tag."""

STRUCTURED_OUTPUT_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")

_TAG_START = f"<{DSML}"
_ESCAPED_DSML = re.compile(r"(?:\\uff5c|｜)DSML(?:\\uff5c|｜)", re.IGNORECASE)
_EBNF_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
_DISPATCH_RULE = re.compile(r"(?:Token)?TagDispatch\(")


def answer_constraint(response_format: ResponseFormat, structured_outputs: Json) -> Mapping[str, Json] | None:
    """What the answer itself must match: one entry under vLLM's names, None without a constraint.

    Raises INVALID_ARGUMENT when the request asks for two different things.
    """
    explicit = read_structured_outputs(structured_outputs)
    if explicit and response_format.type != "text":
        raise invalid_argument("structured_outputs", "cannot be combined with response_format")
    if response_format.type == "json_object":
        return {"json_object": True}
    if response_format.type == "json_schema":
        return {"json": response_format.schema}
    return explicit


def read_structured_outputs(value: Json, path: str = "structured_outputs") -> Mapping[str, Json] | None:
    """Validate ``structured_outputs``: exactly one kind of constraint."""
    if value is None:
        return None
    entry = {key: item for key, item in read_object(value, path).items() if item is not None}
    refuse_unknown(entry, path, STRUCTURED_OUTPUT_KINDS)
    if len(entry) != 1:
        raise invalid_argument(path, f"must have exactly one of {', '.join(STRUCTURED_OUTPUT_KINDS)}")
    kind, constraint = next(iter(entry.items()))
    kind_path = join_path(path, kind)
    if kind in ("regex", "grammar"):
        read_string(constraint, kind_path)
    elif kind == "json_object":
        if not read_boolean(constraint, kind_path):
            return None
    elif kind == "choice":
        options = read_array(constraint, kind_path)
        if not options:
            raise invalid_argument(kind_path, "must not be empty")
        for index, option in enumerate(options):
            read_string(option, f"{kind_path}[{index}]")
    elif isinstance(constraint, str):
        entry[kind] = read_object(parse_json(constraint, kind_path), kind_path)
    else:
        read_object(constraint, kind_path)
    return entry


def output_constraint(
    *,
    start_state: str,
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    parallel_tool_calls: bool,
    answer: Mapping[str, Json] | None,
    token_ids: Mapping[str, int],
) -> dict[str, Json] | None:
    """The ``structured_outputs`` sampling parameter for a request, None when nothing constrains it.

    ``token_ids`` are the ids of ``</think>``, ``<think>``, the DSML token and EOS by name. Reasoning is free text that
    ends with the real ``</think>``; the constraint begins behind it.
    """
    has_tools = bool(tools) and tool_choice.mode != "none"
    strict = has_tools and any(tool.strict for tool in tools)
    if tool_choice.demands_call:
        called = [tool for tool in tools if tool_choice.name in (None, tool.name)]
        body = _demanded_calls(called, parallel_tool_calls, start_state)
    elif answer is not None:
        body = _answer_format(answer)
        if has_tools:
            body = _either(body, _sequence(_text("\n\n"), _block(tools, parallel_tool_calls, strict_only=True)))
    elif strict:
        body = _free_text_with_calls(tools, parallel_tool_calls)
    else:
        return None
    if start_state == "reasoning":
        body = _sequence(_reasoning(token_ids), body)
    elif answer is not None and not has_tools:
        return dict(answer)
    tag = {"type": "structural_tag", "format": body}
    return {"structural_tag": json.dumps(tag, ensure_ascii=False)}


def anchor_control_tokens(ebnf: str, dsml_token_id: int) -> str:
    """Replace the DSML token spelled in the literals of an EBNF grammar by the token.

    ``ebnf`` is ``str(xgrammar.Grammar.from_structural_tag(...))``. Dispatch rules match on text and stay as they are;
    what follows a dispatch is anchored.
    """
    lines = []
    inside_dispatch = False
    for line in ebnf.split("\n"):
        inside_dispatch = inside_dispatch or bool(_DISPATCH_RULE.search(line))
        lines.append(line if inside_dispatch else _EBNF_LITERAL.sub(lambda m: _anchor(m[0], dsml_token_id), line))
        if inside_dispatch and line.rstrip().endswith(")"):
            inside_dispatch = False
    return "\n".join(lines)


def _anchor(literal: str, dsml_token_id: int) -> str:
    token = f"Token({dsml_token_id})"
    parts = [f'"{part}"' if part else "" for part in _ESCAPED_DSML.split(literal[1:-1])]
    return literal if len(parts) == 1 else f" {token} ".join(parts).strip()


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def _reasoning(token_ids: Mapping[str, int]) -> Format:
    """Any tokens but markers, up to the end of reasoning: a block of calls inside it would escape the constraint."""
    excluded = sorted(token_id for name, token_id in token_ids.items() if name != THINK_START)
    end: Format = {"type": "token", "token": token_ids[THINK_END]}
    return _sequence({"type": "any_tokens", "exclude_tokens": excluded}, end)


def _demanded_calls(tools: Sequence[Tool], parallel: bool, start_state: str) -> Format:
    calls = _calls(tools, parallel, strict_only=False)
    if start_state == "tool_block":
        return _sequence(calls, _text(TOOL_CALLS_CLOSE))
    return _sequence(_text(f"\n\n{TOOL_CALLS_OPEN}\n"), calls, _text(TOOL_CALLS_CLOSE))


def _free_text_with_calls(tools: Sequence[Tool], parallel: bool) -> Format:
    """Text, in which any tag must begin a whole block; a call without a block would escape the schemas."""
    return {
        "type": "triggered_tags",
        "triggers": [_TAG_START],
        "tags": [_block(tools, parallel, strict_only=True)],
        "excludes": [THINK_START, THINK_END],
        "stop_after_first": True,
    }


def _block(tools: Sequence[Tool], parallel: bool, *, strict_only: bool) -> Format:
    return {
        "type": "tag",
        "begin": f"{TOOL_CALLS_OPEN}\n",
        "content": _calls(tools, parallel, strict_only=strict_only),
        "end": TOOL_CALLS_CLOSE,
    }


def _calls(tools: Sequence[Tool], parallel: bool, *, strict_only: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": [_call(tool, use_schema=tool.strict or not strict_only) for tool in tools],
        "separator": "",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _call(tool: Tool, *, use_schema: bool) -> Format:
    return {
        "type": "tag",
        "begin": f'<{DSML}invoke name="{tool.name}">\n',
        "content": {
            "type": "json_schema",
            "json_schema": _argument_schema(tool) if use_schema else True,
            "style": "deepseek_xml",
            "max_whitespace_cnt": 2,
            "excludes": [_TAG_START],
        },
        "end": f"{INVOKE_CLOSE}\n",
    }


def _argument_schema(tool: Tool) -> dict[str, Json]:
    """A schema that says nothing of further properties is closed: repeated ones could not be read."""
    schema: dict[str, Json] = dict(tool.parameters or {"type": "object", "properties": {}})
    if "properties" in schema or not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref", "additionalProperties"}:
        schema.setdefault("type", "object")
        schema.setdefault("properties", {})
        schema.setdefault("additionalProperties", False)
    return schema


def _answer_format(answer: Mapping[str, Json]) -> Format:
    kind, constraint = next(iter(answer.items()))
    if kind == "json":
        return {"type": "json_schema", "json_schema": constraint}
    if kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if kind == "regex":
        return {"type": "regex", "pattern": constraint}
    if kind == "choice":
        return _either(*map(_text, constraint))
    if kind == "grammar":
        return {"type": "grammar", "grammar": constraint}
    if not isinstance(constraint.get("format"), dict):
        raise invalid_argument(
            "structured_outputs.structural_tag", "needs a format to be combined with reasoning or tools"
        )
    return dict(constraint["format"])

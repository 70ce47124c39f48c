"""The ``response_format`` field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsv4.chat.fields import (
    Json,
    dump_json,
    join_path,
    read_boolean,
    read_choice,
    read_object,
    read_string,
    refuse_unknown,
)
from dsv4.chat.protocol import RESPONSE_JSON_OBJECT, RESPONSE_SCHEMA_HEAD
from dsv4.chat.tools import check_strict_schema


@dataclass(frozen=True)
class ResponseFormat:
    """``schema`` is set for ``json_schema``; ``prompt_block`` is what the system turn says about the format."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Json] | None = None
    prompt_block: str = ""


TEXT_FORMAT = ResponseFormat("text")


def read_response_format(value: Json, path: str = "response_format") -> ResponseFormat:
    """Validate ``response_format``; a missing field means text."""
    if value is None:
        return TEXT_FORMAT
    entry = read_object(value, path)
    kind = read_choice(entry.get("type"), join_path(path, "type"), ("text", "json_object", "json_schema"))
    refuse_unknown(entry, path, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return TEXT_FORMAT
    if kind == "json_object":
        return ResponseFormat("json_object", prompt_block=RESPONSE_JSON_OBJECT)
    wrapper_path = join_path(path, "json_schema")
    wrapper = read_object(entry.get("json_schema"), wrapper_path)
    refuse_unknown(wrapper, wrapper_path, ("name", "description", "schema", "strict"))
    for name in ("name", "description"):
        if wrapper.get(name) is not None:
            read_string(wrapper[name], join_path(wrapper_path, name))
    schema_path = join_path(wrapper_path, "schema")
    schema = read_object(wrapper.get("schema"), schema_path)
    if wrapper.get("strict") is not None and read_boolean(wrapper["strict"], join_path(wrapper_path, "strict")):
        check_strict_schema(schema, schema_path)
    return ResponseFormat("json_schema", schema, RESPONSE_SCHEMA_HEAD + dump_json(schema, schema_path))

"""Schema violations as one OpenAI error that names the field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dsv4_clients.proxy.errors import ApiError, invalid, unsupported

_FIELD_NAME = re.compile(r"[A-Za-z_]\w*")
_UNION_TAGS = {"str", "int", "float", "bool", "list", "dict", "tuple", "constrained"}
"""pydantic puts the name of the union's branch into the location of an error; it is not part of the JSON path."""


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], fields: dict[str, Any]) -> Model:
    """A request derived from another one. Raises ApiError."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise validation_error([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None


def validation_error(errors: Sequence[dict[str, Any]]) -> ApiError:
    """The first violation (all branches of it, when the field may have several types) as a 400.

    `errors` are pydantic's, with locations that start with `body`.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"The request body is not valid JSON: {reason}.", code="invalid_json")
    if tuple(first["loc"]) == ("body",) and first["type"] in ("missing", "model_attributes_type", "model_type"):
        message = "The request body must be a JSON object, sent with the header Content-Type: application/json."
        return ApiError(400, message, code="invalid_json")
    path = json_path(first["loc"])
    if first["type"] in ("unknown_field", "not_offered"):
        name = str(first["ctx"]["name"])
        refuse = unsupported if first["type"] == "not_offered" else invalid
        return refuse(f"{path}.{name}" if path else name, first["msg"])
    messages = [error["msg"] for error in errors if json_path(error["loc"]) == path]
    return invalid(path, ", or ".join(dict.fromkeys(_rule(message) for message in messages)))


def json_path(location: Sequence[str | int]) -> str:
    """`("body", "messages", 0, "content", "str")` as `messages[0].content`."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _FIELD_NAME.fullmatch(part) and part not in _UNION_TAGS:
            path += f".{part}" if path else part
    return path


def _rule(message: str) -> str:
    if message == "Field required":
        return "is required"
    return message.replace("Input should be", "must be", 1)

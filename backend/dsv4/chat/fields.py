"""Reading untrusted JSON with errors that name the JSON path of the field at fault."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from dsv4.errors import RequestError, invalid_argument

Json = Any
"""A value as json.loads makes it."""


def type_name(value: Json) -> str:
    """JSON's name for the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    for kind, name in ((str, "string"), ((list, tuple), "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return type(value).__name__


def join_path(parent: str, name: str) -> str:
    """Path of a member of ``parent``; the request itself has the empty path."""
    return f"{parent}.{name}" if parent else name


def wrong_type(path: str, expected: str, value: Json) -> RequestError:
    return invalid_argument(path, f"must be {expected}, not {type_name(value)}")


def read_object(value: Json, path: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    return value


def read_array(value: Json, path: str) -> list[Json]:
    if not isinstance(value, (list, tuple)):
        raise wrong_type(path, "an array", value)
    return list(value)


def read_string(value: Json, path: str) -> str:
    """A string that can be written as UTF-8: JSON allows unpaired surrogates, a tokenizer does not."""
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise invalid_argument(path, f"has an unpaired surrogate at character {error.start}") from None
    return value


def read_boolean(value: Json, path: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(path, "a boolean", value)
    return value


def read_integer(value: Json, path: str, *, minimum: int | None = None, maximum: int | None = None) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, float):
            raise invalid_argument(path, f"must be an integer, not {value!r}")
        raise wrong_type(path, "an integer", value)
    _check_range(value, path, minimum, maximum)
    return value


def _check_range(value: float, path: str, minimum: float | None, maximum: float | None) -> None:
    if minimum is not None and maximum is not None and not minimum <= value <= maximum:
        raise invalid_argument(path, f"must be between {minimum} and {maximum}, not {value}")
    if minimum is not None and value < minimum:
        raise invalid_argument(path, f"must be at least {minimum}, not {value}")
    if maximum is not None and value > maximum:
        raise invalid_argument(path, f"must be at most {maximum}, not {value}")


def read_choice(value: Json, path: str, choices: Iterable[str]) -> str:
    options = list(choices)
    if not isinstance(value, str) or value not in options:
        listed = ", ".join(options)
        shown = repr(value) if isinstance(value, str) else type_name(value)
        raise invalid_argument(path, f"must be one of {listed}, not {shown}")
    return value


def refuse_unknown(value: Mapping[str, Json], path: str, known: Iterable[str]) -> None:
    """Raise for the first key that is not known, with the nearest known name."""
    names = set(known)
    for key in value:
        if key in names:
            continue
        nearest = difflib.get_close_matches(key, sorted(names), n=1, cutoff=0.7)
        hint = f", did you mean {nearest[0]!r}?" if nearest else ""
        raise invalid_argument(join_path(path, str(key)), f"unknown field {key!r}{hint}")


def parse_json(text: str, path: str) -> Json:
    """Parse standard JSON: NaN and infinities, numbers beyond any float and endless nesting are errors."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
    except RecursionError:
        raise invalid_argument(path, "is nested too deeply") from None
    except ValueError as error:
        raise invalid_argument(path, f"is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def dump_json(value: Json, path: str) -> str:
    """Serialise as the protocol writes JSON: ``", "`` and ``": "``, no ASCII escapes, key order kept."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise invalid_argument(path, "is nested too deeply") from None
    except ValueError as error:
        raise invalid_argument(path, f"cannot be written as JSON: {error}") from None
    return read_string(text, path)

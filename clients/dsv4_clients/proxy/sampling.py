"""Sampling parameters of a request: server-wide defaults, then what the client gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsv4.errors import ConfigurationError, RequestError
from dsv4.sampling_parameters import parse_sampling_parameters

from dsv4_clients.proxy.errors import invalid, unsupported
from dsv4_clients.proxy.schemas.common import GenerationFields, SamplingFields

_PLAIN_FIELDS = tuple(name for name in SamplingFields.model_fields if not name.startswith("guided_"))
_GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def read_generate_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check server-wide sampling defaults; `max_new_tokens` is accepted for `max_tokens`.

    Raises ConfigurationError.
    """
    values = dict(config)
    if "max_new_tokens" in values:
        values.setdefault("max_tokens", values.pop("max_new_tokens"))
    try:
        parse_sampling_parameters(values)
    except RequestError as error:
        raise ConfigurationError(f"--generate-config: {error.message}") from None
    return values


def sampling_parameters(body: GenerationFields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters under the engine's names. A field given as null clears the server's default."""
    values = dict(defaults)
    given = body.model_fields_set
    for name in _PLAIN_FIELDS:
        if name in given:
            _put(values, name, getattr(body, name))
    if "max_tokens" in given:
        _put(values, "max_tokens", getattr(body, "max_tokens", None))
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    _read_guided_fields(body, values)
    return values


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        values.pop(name, None)
    else:
        values[name] = value


def _read_guided_fields(body: GenerationFields, values: dict[str, Any]) -> None:
    for name, key in _GUIDED_FIELDS.items():
        constraint = getattr(body, name)
        if constraint is None:
            continue
        if "structured_outputs" in values:
            raise invalid(name, "only one structured output constraint can be given")
        values["structured_outputs"] = {key: constraint}


def check_choices(body: GenerationFields, parameters: Mapping[str, Any]) -> int:
    """Number of choices. Several greedy ones would be copies of one, so they are refused."""
    count = body.n or 1
    if count > 1 and not parameters.get("temperature"):
        raise unsupported("n", "more than one choice needs temperature above 0, greedy decoding has one answer")
    return count


def parameters_of_choice(parameters: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The same parameters with a seed of the choice's own, when a seed was given."""
    values = dict(parameters)
    if values.get("seed") is not None:
        values["seed"] += index
    return values


def check_stream_options(body: GenerationFields) -> None:
    """`stream_options` without `stream` is an error, as in OpenAI's API."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only allowed with stream set to true")

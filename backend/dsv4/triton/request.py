"""From the tensors and parameters of a Triton request to a typed request. Every mistake is an error with the field."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from dsv4.chat import OutputFormat
from dsv4.engine.protocol import GenerateRequest
from dsv4.errors import invalid_argument
from dsv4.sampling_parameters import SamplingParameters, parse_sampling_parameters
from dsv4.triton.api import Request
from dsv4.triton.tensors import RETURN_FLAGS

CONTROL_COMMANDS = ("abort", "health", "stats", "start_profile", "stop_profile")
_CONTROL_PARAMETERS = ("control", "abort_request_id")
_SAMPLING_PARAMETERS = SamplingParameters.__struct_fields__
# Triton's HTTP frontend hands these on although it has read them itself.
_TRANSPORT_PARAMETERS = ("id", "timeout", "timeout_ms", "binary_data_output")
_RESERVED_PREFIXES = ("sequence_", "triton_")
KNOWN_PARAMETERS = (*_CONTROL_PARAMETERS, *_TRANSPORT_PARAMETERS, *_SAMPLING_PARAMETERS)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What the client wants to get back.

    `echo` is put in front of the text of an answer that is not streamed. The flags are those of `RETURN_FLAGS`.
    """

    stream: bool = False
    echo: str = ""
    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    token_ids: bool = False


@dataclass(frozen=True)
class Generation:
    """A request for the engine, the client's name for it (possibly empty, not unique), and the wanted outputs."""

    client_id: str
    request: GenerateRequest
    options: OutputOptions


@dataclass(frozen=True)
class Control:
    """A request that the stub answers by itself: `command` is one of CONTROL_COMMANDS."""

    command: str
    abort_request_id: str | None = None


def read_request(request: Request, *, engine_request_id: str) -> Generation | Control:
    """Validate one Triton request. `engine_request_id` must be unique among live requests.

    Raises RequestError INVALID_ARGUMENT naming the tensor, the sampling field or the parameter.
    """
    parameters = read_parameters(request, KNOWN_PARAMETERS)
    if "control" in parameters:
        return _read_control(parameters)
    if "abort_request_id" in parameters:
        raise invalid_argument("abort_request_id", "is allowed only with control: abort")
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    text, token_ids = _read_prompt(inputs)
    options = _read_options(inputs, text)
    sampling = _read_sampling_parameters(inputs, parameters)
    if sampling.logprobs is None and (options.logprobs or options.cumulative_logprob):
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    return Generation(
        client_id=request.request_id(),
        request=GenerateRequest(
            request_id=engine_request_id,
            prompt_token_ids=token_ids,
            prompt_text=text,
            sampling_parameters=sampling,
            output_format=_read_output_format(inputs),
            timeout_seconds=read_timeout_seconds(request.timeout(), parameters),
        ),
        options=options,
    )


def read_parameters(request: Request, known: Iterable[str]) -> dict[str, Any]:
    """The request parameters, all of them known. Raises INVALID_ARGUMENT with the nearest name for a stranger."""
    parameters = json.loads(request.parameters() or "{}")
    # A misspelt tensor name arrives as a parameter on the generate endpoints, so tensor names are suggested too.
    names = list(known)
    for name in parameters:
        if name in names or name.startswith(_RESERVED_PREFIXES):
            continue
        nearest = difflib.get_close_matches(name, [*names, *_INPUT_NAMES], n=1)
        hint = f"; did you mean '{nearest[0]}'?" if nearest and nearest[0] != name else ""
        raise invalid_argument(name, f"unknown input or parameter{hint}")
    return parameters


_INPUT_NAMES = (
    "text_input",
    "input_ids",
    "stream",
    "sampling_parameters",
    "output_format",
    "exclude_input_in_output",
    "chat_request",
    *RETURN_FLAGS,
)


def read_timeout_seconds(timeout_microseconds: int, parameters: Mapping[str, Any]) -> float | None:
    """The nearest of the deadlines: Triton's own, and the parameters `timeout` (µs) and `timeout_ms`."""
    deadlines = [timeout_microseconds / 1e6] if timeout_microseconds > 0 else []
    for name, unit in (("timeout", 1e-6), ("timeout_ms", 1e-3)):
        if name in parameters:
            value = parameters[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise invalid_argument(name, f"must be a positive number, got {value!r}")
            deadlines.append(value * unit)
    return min(deadlines, default=None)


def read_text(name: str, values: np.ndarray) -> str:
    """The one string of a STRING tensor. Raises INVALID_ARGUMENT."""
    value = _single(name, values)
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid_argument(name, f"is not UTF-8 ({error.reason} at byte {error.start})") from None


def _single(name: str, values: np.ndarray) -> Any:
    if values.size != 1:
        raise invalid_argument(name, f"must have exactly one element, got shape {list(values.shape)}")
    return values.reshape(-1)[0]


def _read_control(parameters: Mapping[str, Any]) -> Control:
    command, target = parameters["control"], parameters.get("abort_request_id")
    if command not in CONTROL_COMMANDS:
        raise invalid_argument("control", f"must be one of {', '.join(CONTROL_COMMANDS)}, got {command!r}")
    if (command == "abort") != (target is not None):
        raise invalid_argument("abort_request_id", "is needed with control: abort and allowed only there")
    if target is not None and not (isinstance(target, str) and target):
        raise invalid_argument("abort_request_id", f"must be the id of a request, got {target!r}")
    return Control(command, target)


def _read_prompt(inputs: Mapping[str, np.ndarray]) -> tuple[str | None, list[int] | None]:
    """Exactly one of text and token ids."""
    if "text_input" in inputs and "input_ids" in inputs:
        raise invalid_argument("text_input", "give either text_input or input_ids, not both")
    if "text_input" in inputs:
        text = read_text("text_input", inputs["text_input"])
        if not text:
            raise invalid_argument("text_input", "must not be empty")
        return text, None
    if "input_ids" not in inputs:
        raise invalid_argument("text_input", "no prompt: give text_input or input_ids")
    ids = inputs["input_ids"].reshape(-1)
    if ids.size == 0:
        raise invalid_argument("input_ids", "must not be empty")
    if int(ids.min()) < 0:
        raise invalid_argument("input_ids", f"must not be negative, got {int(ids.min())}")
    return None, ids.tolist()


def _read_options(inputs: Mapping[str, np.ndarray], text: str | None) -> OutputOptions:
    def flag(name: str, default: bool = False) -> bool:
        return bool(_single(name, inputs[name])) if name in inputs else default

    stream = flag("stream")
    exclude_input = "exclude_input_in_output"
    # As in the vLLM backend: a text prompt is repeated in an answer that is not streamed, unless excluded.
    echo = not flag(exclude_input, default=stream or text is None or "output_format" in inputs)
    if echo and stream:
        raise invalid_argument(exclude_input, "must not be false when streaming")
    if echo and text is None:
        raise invalid_argument(exclude_input, "must not be false with input_ids: there is no text to repeat")
    return OutputOptions(
        stream=stream,
        echo=text if echo and text is not None else "",
        **{name.removeprefix("return_"): flag(name) for name in RETURN_FLAGS},
    )


def _read_sampling_parameters(inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any]) -> SamplingParameters:
    """The JSON tensor together with scalar request parameters of the same names."""
    fields: dict[str, Any] = {}
    if "sampling_parameters" in inputs:
        text = read_text("sampling_parameters", inputs["sampling_parameters"])
        try:
            fields = json.loads(text) if text else {}
        except (ValueError, RecursionError) as error:
            raise invalid_argument("sampling_parameters", f"not valid JSON ({error})") from None
        if not isinstance(fields, dict):
            raise invalid_argument("sampling_parameters", f"must be a JSON object, not {type(fields).__name__}")
    for name in _SAMPLING_PARAMETERS:
        if name in parameters:
            if fields.get(name) is not None:
                raise invalid_argument(name, "is given twice, in sampling_parameters and as a request parameter")
            fields[name] = parameters[name]
    return parse_sampling_parameters(fields)


def _read_output_format(inputs: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    if "output_format" not in inputs:
        return None
    text = read_text("output_format", inputs["output_format"])
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_argument("output_format", f"not valid JSON ({error})") from None
    return OutputFormat.from_dict(value).to_dict()

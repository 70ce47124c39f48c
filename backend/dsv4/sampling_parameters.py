"""Sampling parameters under vLLM's names, validated once at the edge."""

from __future__ import annotations

import difflib
import json
import math
from typing import Any

import msgspec

from dsv4.errors import ErrorCode, RequestError, invalid_argument

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the tokens of one request are chosen and when it ends. Greedy unless `temperature` is above 0.

    `max_tokens` None means up to the model's context. `top_k` 0 or -1 means all tokens. `logprobs` is the number of
    alternatives per token (0: only the sampled token). `priority`: lower runs first.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0


_FIELDS = SamplingParameters.__struct_fields__


def parse_sampling_parameters(value: str | bytes | dict[str, Any]) -> SamplingParameters:
    """Decode and check a JSON object of sampling parameters.

    A null value means "not given". Raises RequestError INVALID_ARGUMENT that names the field.
    """
    fields = _decode_object(value)
    for name in fields:
        if name not in _FIELDS:
            raise invalid_argument(f"sampling_parameters.{name}", "unknown field" + _nearest(name))
    given = {name: item for name, item in fields.items() if item is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        parameters = msgspec.convert(given, SamplingParameters)
    except msgspec.ValidationError as error:
        raise _named_validation_error(error) from None
    _check_ranges(parameters)
    return parameters


def _decode_object(value: str | bytes | dict[str, Any]) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        decoded = json.loads(value)
    except (ValueError, UnicodeDecodeError) as error:
        raise invalid_argument("sampling_parameters", f"not valid JSON ({error})") from None
    if not isinstance(decoded, dict):
        raise invalid_argument("sampling_parameters", f"must be a JSON object, not {type(decoded).__name__}")
    return decoded


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, _FIELDS, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known fields are {', '.join(_FIELDS)}"


def _named_validation_error(error: msgspec.ValidationError) -> RequestError:
    """msgspec says ``Expected `int`, got `str` - at `$.top_k` ``: put the field first."""
    text, _, path = str(error).partition(" - at `$.")
    return invalid_argument(path.rstrip("`") or "sampling_parameters", text[:1].lower() + text[1:])


def _check_ranges(p: SamplingParameters) -> None:
    def require(condition: bool, field: str, rule: str) -> None:
        if not condition:
            raise invalid_argument(field, f"{rule}, got {getattr(p, field)!r}")

    for field in (
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ):
        require(math.isfinite(getattr(p, field)), field, "must be a finite number")
    require(p.max_tokens is None or p.max_tokens >= 1, "max_tokens", "must be at least 1")
    require(p.min_tokens >= 0, "min_tokens", "must be at least 0")
    require(p.max_tokens is None or p.min_tokens <= p.max_tokens, "min_tokens", "must not exceed max_tokens")
    require(0.0 <= p.temperature <= 2.0, "temperature", "must be between 0 and 2")
    require(0.0 < p.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
    require(p.top_k >= -1, "top_k", "must be -1, 0 (all tokens) or positive")
    require(0.0 <= p.min_p <= 1.0, "min_p", "must be between 0 and 1")
    require(p.seed is None or -(2**63) <= p.seed < 2**63, "seed", "must fit in 64 bits")
    require(len(p.stop) <= MAX_STOP_STRINGS, "stop", f"must have at most {MAX_STOP_STRINGS} strings")
    require(all(p.stop), "stop", "must not contain an empty string")
    require(all(token >= 0 for token in p.stop_token_ids), "stop_token_ids", "must not be negative")
    require(-2.0 <= p.presence_penalty <= 2.0, "presence_penalty", "must be between -2 and 2")
    require(-2.0 <= p.frequency_penalty <= 2.0, "frequency_penalty", "must be between -2 and 2")
    require(p.repetition_penalty > 0.0, "repetition_penalty", "must be above 0")
    require(p.logprobs is None or 0 <= p.logprobs <= MAX_LOGPROBS, "logprobs", f"must be 0 to {MAX_LOGPROBS}")
    require(
        p.prompt_logprobs is None or 0 <= p.prompt_logprobs <= MAX_LOGPROBS,
        "prompt_logprobs",
        f"must be 0 to {MAX_LOGPROBS}",
    )
    for token, bias in (p.logit_bias or {}).items():
        if not token.isdecimal():
            raise invalid_argument("logit_bias", f"keys must be token ids, got {token!r}")
        if not -100.0 <= bias <= 100.0:
            raise invalid_argument("logit_bias", f"values must be between -100 and 100, got {bias!r} for {token}")


def unsupported(field: str, message: str) -> RequestError:
    """UNSUPPORTED whose message starts with the field's name."""
    return RequestError(ErrorCode.UNSUPPORTED, f"{field}: {message}", field=field)

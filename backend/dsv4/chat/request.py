"""A whole OpenAI chat request: prompt ids, sampling parameters and output format for the engine."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4.chat.encoding import EncodedChat, encode_chat
from dsv4.chat.fields import (
    Json,
    parse_json,
    read_array,
    read_boolean,
    read_integer,
    read_object,
    read_string,
    refuse_unknown,
)
from dsv4.chat.grammar import answer_constraint, output_constraint
from dsv4.chat.output_format import OutputFormat
from dsv4.chat.protocol import DSML, END_OF_SENTENCE, THINK_END, THINK_START
from dsv4.chat.tokenizer import ChatTokenizer
from dsv4.errors import ErrorCode, RequestError, invalid_argument
from dsv4.sampling_parameters import MAX_LOGPROBS, parse_sampling_parameters

_PROMPT_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "thinking",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "include_reasoning",
)
# Passed to the engine under the same name.
_SAMPLING_FIELDS = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "prompt_logprobs",
    "priority",
)
_TRANSLATED_FIELDS = ("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "n", "structured_outputs")
_GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# The proxy's business, or without meaning for a single answer.
_TRANSPORT_FIELDS = (
    "model",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "request_id",
    "modalities",
    "return_token_ids",
)
_UNSUPPORTED_FIELDS = {
    "functions": "is not supported; use tools",
    "function_call": "is not supported; use tool_choice",
    "audio": "is not supported; the model reads and writes text",
    "prediction": "is not supported",
    "web_search_options": "is not supported",
    "best_of": "is not supported",
    "use_beam_search": "is not supported",
    "echo": "is not supported",
}
KNOWN_FIELDS = (
    *_PROMPT_FIELDS,
    *_SAMPLING_FIELDS,
    *_TRANSLATED_FIELDS,
    *_GUIDED_FIELDS,
    *_TRANSPORT_FIELDS,
    *_UNSUPPORTED_FIELDS,
)


@dataclass(frozen=True)
class EncodedRequest:
    """``input_ids`` are int32. The dictionaries are plain JSON for ``sampling_parameters`` and ``output_format``."""

    input_ids: array[int]
    sampling_parameters: dict[str, Any]
    output_format: dict[str, Any]
    chat: EncodedChat


def encode_request(
    body: Mapping[str, Json] | str | bytes,
    *,
    tokenizer: ChatTokenizer,
    revision: str,
    max_model_len: int | None = None,
) -> EncodedRequest:
    """Validate a chat request and translate it for the engine.

    ``body`` is the JSON body, parsed or not. Null counts as not given. With ``max_model_len`` (tokens) prompts and
    budgets that do not fit are refused.

    Raises RequestError INVALID_ARGUMENT (naming the JSON path at fault) or UNSUPPORTED.
    """
    if isinstance(body, (str, bytes)):
        body = read_body(body)
    request = {name: value for name, value in body.items() if value is not None}
    _check_fields(request)
    _check_transport(request)
    sampling = _read_sampling(request, tokenizer.vocab_size)
    chat = encode_chat(request, revision=revision, tokenizer=tokenizer)
    answer = answer_constraint(chat.response_format, _read_constraint(request))
    constraint = output_constraint(
        start_state=chat.start_state,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        parallel_tool_calls=chat.parallel_tool_calls,
        answer=answer,
        token_ids={name: tokenizer.token_id(name) for name in (THINK_START, THINK_END, DSML, END_OF_SENTENCE)},
    )
    if constraint is not None:
        sampling["structured_outputs"] = constraint
    input_ids = chat.token_array if chat.token_array is not None else array("i")
    _check_length(len(input_ids), sampling.get("max_tokens"), max_model_len, request)
    return EncodedRequest(input_ids, sampling, output_format_of(chat).to_dict(), chat)


def read_body(text: str | bytes) -> dict[str, Json]:
    """Parse the JSON text of a request. Raises INVALID_ARGUMENT."""
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise invalid_argument("chat_request", f"is not UTF-8: {error.reason} at byte {error.start}") from None
    return read_object(parse_json(text, "chat_request"), "chat_request")


def output_format_of(chat: EncodedChat) -> OutputFormat:
    """How the engine is to parse the answer to an encoded request."""
    return OutputFormat(
        start_state=chat.start_state,
        tools=tuple(tool.name for tool in chat.tools),
        tool_choice=chat.tool_choice.mode,
        tool_name=chat.tool_choice.name,
        parallel_tool_calls=chat.parallel_tool_calls,
        include_reasoning=chat.include_reasoning,
    )


def _check_fields(request: Mapping[str, Json]) -> None:
    refuse_unknown(request, "", KNOWN_FIELDS)
    for name, reason in _UNSUPPORTED_FIELDS.items():
        if name in request:
            raise RequestError(ErrorCode.UNSUPPORTED, f"{name}: {reason}", field=name)


def _check_transport(request: Mapping[str, Json]) -> None:
    stream = "stream" in request and read_boolean(request["stream"], "stream")
    if "stream_options" in request:
        if not stream:
            raise invalid_argument("stream_options", "is allowed only with stream: true")
        options = read_object(request["stream_options"], "stream_options")
        refuse_unknown(options, "stream_options", ("include_usage", "continuous_usage_stats", "include_obfuscation"))
        for name, value in options.items():
            if value is not None:
                read_boolean(value, f"stream_options.{name}")
    if "n" in request and read_integer(request["n"], "n", minimum=1) != 1:
        raise invalid_argument("n", f"must be 1, not {request['n']}")
    if request.get("modalities", ["text"]) != ["text"]:
        raise invalid_argument("modalities", "must be ['text']")
    if "model" in request:
        read_string(request["model"], "model")


def _read_sampling(request: Mapping[str, Json], vocab_size: int) -> dict[str, Any]:
    sampling = {name: request[name] for name in _SAMPLING_FIELDS if name in request}
    max_tokens = _read_max_tokens(request)
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    logprobs = _read_logprobs(request)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    for index, stop in enumerate(read_array(sampling.get("stop", ()), "stop")):
        read_string(stop, f"stop[{index}]")
    parse_sampling_parameters(sampling)
    for name in ("logit_bias", "stop_token_ids"):
        for token in sampling.get(name, ()):
            if int(token) >= vocab_size:
                raise invalid_argument(name, f"token id {token} is not below the vocabulary size {vocab_size}")
    return sampling


def _read_max_tokens(request: Mapping[str, Json]) -> int | None:
    limits = [
        read_integer(request[name], name, minimum=1)
        for name in ("max_completion_tokens", "max_tokens")
        if name in request
    ]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise invalid_argument("max_tokens", "contradicts max_completion_tokens; give one of them")
    return limits[0] if limits else None


def _read_logprobs(request: Mapping[str, Json]) -> int | None:
    wanted = "logprobs" in request and read_boolean(request["logprobs"], "logprobs")
    if "top_logprobs" not in request:
        return 0 if wanted else None
    top = read_integer(request["top_logprobs"], "top_logprobs", minimum=0, maximum=MAX_LOGPROBS)
    if not wanted:
        raise invalid_argument("top_logprobs", "is allowed only with logprobs: true")
    return top


def _read_constraint(request: Mapping[str, Json]) -> Json:
    """``structured_outputs``, or one of vLLM's older ``guided_`` fields in its form."""
    given = [name for name in ("structured_outputs", *_GUIDED_FIELDS) if name in request]
    if not given:
        return None
    if len(given) > 1:
        raise invalid_argument(given[1], f"cannot be combined with {given[0]}")
    name = given[0]
    return request[name] if name == "structured_outputs" else {_GUIDED_FIELDS[name]: request[name]}


def _check_length(
    prompt_length: int, max_tokens: int | None, max_model_len: int | None, request: Mapping[str, Json]
) -> None:
    if max_model_len is None:
        return
    if prompt_length >= max_model_len:
        raise invalid_argument(
            "messages", f"the prompt has {prompt_length} tokens and leaves no room within max_model_len {max_model_len}"
        )
    if max_tokens is not None and prompt_length + max_tokens > max_model_len:
        name = "max_completion_tokens" if "max_completion_tokens" in request else "max_tokens"
        raise invalid_argument(
            name,
            f"{max_tokens} more than the {prompt_length} tokens of the prompt exceed max_model_len {max_model_len}",
        )

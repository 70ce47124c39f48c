"""Chat completions: from the request to generations, and from engine outputs to OpenAI's objects."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4_clients.proxy.context import ProxyContext, new_id
from dsv4_clients.proxy.errors import invalid
from dsv4_clients.proxy.generation import ChoiceResult, collect_generations, run_generations
from dsv4_clients.proxy.logprobs import chat_logprobs
from dsv4_clients.proxy.sampling import check_choices, check_stream_options, parameters_of_choice, sampling_parameters
from dsv4_clients.proxy.schemas.chat import ChatCompletionRequest
from dsv4_clients.proxy.sse import DONE, data_event
from dsv4_clients.proxy.triton_client import EncodedChat, EngineOutput, Generation
from dsv4_clients.proxy.usage import UsageTotals, simple_usage

_REASONING_NAMES = ("reasoning_content", "reasoning")
_CHAT_FIELDS = {
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "thinking",
    "chat_template_kwargs",
    "include_reasoning",
    "continue_final_message",
    "add_generation_prompt",
}
"""What the encode step reads besides sampling parameters."""


@dataclass(frozen=True)
class ChatRun:
    """One chat request, encoded. The choices differ only in their seeds."""

    id: str
    model: str
    created: int
    body: ChatCompletionRequest
    encoded: EncodedChat
    generations: Sequence[Generation]

    @property
    def alternatives(self) -> int | None:
        """Number of top_logprobs a token; None without logprobs."""
        return (self.body.top_logprobs or 0) if self.body.logprobs else None


async def prepare_chat(
    context: ProxyContext,
    body: ChatCompletionRequest,
    *,
    metadata: Sequence[tuple[str, str]] = (),
    id_prefix: str = "chatcmpl",
) -> ChatRun:
    """Check the request, have Triton encode it, and plan its generations.

    Raises ApiError or RequestError.
    """
    model = context.resolve_model(body.model)
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs set to true")
    parameters = _sampling_parameters(context, body)
    choices = check_choices(body, parameters)
    encoded = await _encode(context, body, parameters, metadata)
    check_prompt_length(context, len(encoded.input_ids), "messages")
    run_id = new_id(id_prefix)
    generations = [
        Generation(
            request_id=run_id if choices == 1 else f"{run_id}-{index}",
            sampling_parameters=parameters_of_choice(encoded.sampling_parameters, index),
            input_ids=encoded.input_ids,
            output_format=encoded.output_format,
            stream=bool(body.stream),
            return_token_ids=bool(body.return_token_ids or wants_continuous_usage(body)),
            return_logprobs=bool(body.logprobs),
            timeout_seconds=context.settings.request_timeout_seconds,
            metadata=metadata,
        )
        for index in range(choices)
    ]
    return ChatRun(run_id, model, int(time.time()), body, encoded, generations)


async def encode_only(
    context: ProxyContext, body: ChatCompletionRequest, *, metadata: Sequence[tuple[str, str]] = ()
) -> EncodedChat:
    """The prompt of a chat request, without generating. Raises ApiError or RequestError."""
    context.resolve_model(body.model)
    return await _encode(context, body, {}, metadata)


async def _encode(
    context: ProxyContext,
    body: ChatCompletionRequest,
    parameters: dict[str, Any],
    metadata: Sequence[tuple[str, str]],
) -> EncodedChat:
    given = body.model_dump(exclude_unset=True, warnings=False, include=_CHAT_FIELDS)
    return await context.client.encode(
        json.dumps({**given, **parameters}).encode(),
        timeout_seconds=context.settings.request_timeout_seconds,
        metadata=metadata,
    )


def _sampling_parameters(context: ProxyContext, body: ChatCompletionRequest) -> dict[str, Any]:
    parameters = sampling_parameters(body, context.settings.generate_config)
    if body.max_completion_tokens is not None:
        parameters["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        parameters.update(logprobs=True, top_logprobs=body.top_logprobs or 0)
    return parameters


def check_prompt_length(context: ProxyContext, tokens: int, field: str) -> None:
    """Raises a 400 for a prompt above --max-prompt-tokens."""
    limit = context.settings.max_prompt_tokens
    if limit is not None and tokens > limit:
        raise invalid(field, f"the prompt has {tokens} tokens, at most {limit} are allowed")


def wants_continuous_usage(body: Any) -> bool:
    """True when every chunk is to carry the usage so far."""
    return bool(body.stream_options and body.stream_options.continuous_usage_stats)


async def complete_chat(context: ProxyContext, run: ChatRun) -> dict[str, Any]:
    """The whole answer as a `chat.completion` object."""
    results = await collect_generations(context, run.generations)
    usage = UsageTotals()
    choices = []
    for index, result in enumerate(results):
        usage.add(0, result.usage)
        choices.append(_choice(run, index, result))
    answer = {
        "id": run.id,
        "object": "chat.completion",
        "created": run.created,
        "model": run.model,
        "choices": choices,
        "usage": usage.to_openai(),
    }
    if run.body.return_token_ids:
        answer["prompt_token_ids"] = run.encoded.input_ids
    return answer


def _choice(run: ChatRun, index: int, result: ChoiceResult) -> dict[str, Any]:
    choice = {
        "index": index,
        "message": chat_message(result, include_reasoning=run.body.include_reasoning is not False),
        "logprobs": None if run.alternatives is None else chat_logprobs(result.logprobs, run.alternatives),
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
    }
    if run.body.return_token_ids:
        choice["token_ids"] = result.token_ids
    return choice


def chat_message(result: ChoiceResult, *, include_reasoning: bool = True) -> dict[str, Any]:
    """The assistant message of a finished choice. `content` is null when there are only tool calls."""
    merged = _with_both_reasoning_names(result.message, include_reasoning)
    calls = merged.get("tool_calls")
    message = {
        "role": "assistant",
        "content": merged.get("content") or (None if calls else ""),
        "refusal": None,
    }
    for name in _REASONING_NAMES:
        if name in merged:
            message[name] = merged[name]
    if calls:
        message["tool_calls"] = calls
    return message


def _with_both_reasoning_names(delta: dict[str, Any], include_reasoning: bool) -> dict[str, Any]:
    """Reasoning under DeepSeek's and vLLM's name, or under none; the role and empty fields are left out."""
    named = {name: value for name, value in delta.items() if value and name not in ("role", *_REASONING_NAMES)}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    if reasoning and include_reasoning:
        named = {"reasoning_content": reasoning, "reasoning": reasoning, **named}
    return named


async def chat_chunks(context: ProxyContext, run: ChatRun) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events of `chat.completion.chunk` objects, ended by [DONE]."""
    writer = _ChunkWriter(run)
    outputs = run_generations(context, run.generations)
    try:
        async for index, output in outputs:
            for chunk in writer.chunks(index, output):
                yield chunk
    finally:
        await outputs.aclose()
    if writer.include_usage:
        yield writer.usage_chunk()
    yield DONE


class _ChunkWriter:
    """Turns engine outputs into chunks, remembering what was sent for each choice."""

    def __init__(self, run: ChatRun) -> None:
        self._run = run
        self._started: set[int] = set()
        self._usage = UsageTotals()
        self._completion_tokens = 0
        self._continuous_usage = wants_continuous_usage(run.body)
        self._include_reasoning = run.body.include_reasoning is not False
        self.include_usage = bool(run.body.stream_options and run.body.stream_options.include_usage)

    def chunks(self, index: int, output: EngineOutput) -> list[bytes]:
        """Chunks for one output; none when it changes nothing that the client sees."""
        events = []
        if index not in self._started:
            self._started.add(index)
            events.append(self._first_chunk(index))
        self._completion_tokens += len(output.token_ids)
        if output.usage is not None:
            self._usage.add(0, output.usage)
        choice = self._choice(index, output)
        if choice is not None:
            events.append(self._chunk([choice]))
        return events

    def _first_chunk(self, index: int) -> bytes:
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        if self._run.body.return_token_ids:
            return self._chunk([{**choice, "finish_reason": None}], prompt_token_ids=self._run.encoded.input_ids)
        return self._chunk([{**choice, "finish_reason": None}])

    def _choice(self, index: int, output: EngineOutput) -> dict[str, Any] | None:
        delta = _with_both_reasoning_names(output.chat_delta, self._include_reasoning) if output.chat_delta else {}
        alternatives = self._run.alternatives
        logprobs = None
        if alternatives is not None and output.logprobs:
            logprobs = chat_logprobs(output.logprobs, alternatives)
        wants_tokens = self._run.body.return_token_ids and output.token_ids
        if not (delta or logprobs or wants_tokens or output.finish_reason):
            return None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": output.finish_reason}
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if wants_tokens:
            choice["token_ids"] = output.token_ids
        return choice

    def usage_chunk(self) -> bytes:
        """The chunk that has the usage and no choice."""
        return self._chunk([], usage=self._usage.to_openai())

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        run = self._run
        chunk = {
            "id": run.id,
            "object": "chat.completion.chunk",
            "created": run.created,
            "model": run.model,
            "choices": choices,
        }
        if self._continuous_usage and choices:
            chunk["usage"] = simple_usage(len(run.encoded.input_ids), self._completion_tokens)
        elif self.include_usage:
            chunk["usage"] = None
        chunk.update(more)
        return data_event(chunk)

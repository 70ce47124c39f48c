"""Text completions: from the request to generations, and from engine outputs to OpenAI's objects."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4_clients.proxy.chat_completion import check_prompt_length, wants_continuous_usage
from dsv4_clients.proxy.context import ProxyContext, new_id
from dsv4_clients.proxy.errors import invalid, unsupported
from dsv4_clients.proxy.generation import ChoiceResult, collect_generations, run_generations
from dsv4_clients.proxy.logprobs import completion_logprobs
from dsv4_clients.proxy.sampling import check_choices, check_stream_options, parameters_of_choice, sampling_parameters
from dsv4_clients.proxy.schemas.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from dsv4_clients.proxy.sse import DONE, data_event
from dsv4_clients.proxy.triton_client import EngineOutput, Generation
from dsv4_clients.proxy.usage import UsageTotals, simple_usage

MAX_CHOICES = 128
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class CompletionRun:
    """One completion request. Generation `p * choices_per_prompt + c` is choice `c` of prompt `p`.

    `echoes` has the text in front of the answers of each prompt.
    """

    id: str
    model: str
    created: int
    body: CompletionRequest
    choices_per_prompt: int
    generations: Sequence[Generation]
    echoes: Sequence[str]

    def prompt_index(self, index: int) -> int:
        """The prompt that a generation continues."""
        return index // self.choices_per_prompt

    def echo(self, index: int) -> str:
        """Text in front of a generation's own."""
        return self.echoes[self.prompt_index(index)]


def prepare_completion(
    context: ProxyContext, body: CompletionRequest, *, metadata: Sequence[tuple[str, str]] = ()
) -> CompletionRun:
    """Check the request and plan its generations. Raises ApiError."""
    model = context.resolve_model(body.model)
    check_stream_options(body)
    if body.suffix:
        raise unsupported("suffix", "inserting text is not offered")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "must equal n")
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "cannot be combined with logprobs, prompt tokens have none here")
    parameters = sampling_parameters(body, {"max_tokens": DEFAULT_MAX_TOKENS, **context.settings.generate_config})
    if body.logprobs is not None:
        parameters["logprobs"] = body.logprobs
    choices = check_choices(body, parameters)
    prompts = read_prompts(context, body.prompt)
    if len(prompts) * choices > MAX_CHOICES:
        raise invalid("prompt", f"prompts times n is {len(prompts) * choices}, at most {MAX_CHOICES} are allowed")
    run_id = new_id("cmpl")
    generations = [
        Generation(
            request_id=f"{run_id}-{prompt_index * choices + choice}",
            sampling_parameters=parameters_of_choice(parameters, choice),
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            stream=bool(body.stream),
            return_token_ids=bool(body.return_token_ids or wants_continuous_usage(body)),
            return_logprobs=body.logprobs is not None,
            timeout_seconds=context.settings.request_timeout_seconds,
            metadata=metadata,
        )
        for prompt_index, prompt in enumerate(prompts)
        for choice in range(choices)
    ]
    echoes = [_echo(context, prompt) if body.echo else "" for prompt in prompts]
    return CompletionRun(run_id, model, int(time.time()), body, choices, generations, echoes)


def _echo(context: ProxyContext, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    if context.tokenizer is None:
        raise unsupported("echo", "token ids can be echoed only by a proxy started with --tokenizer")
    return context.tokenizer.decode(prompt, skip_special_tokens=False)


def read_prompts(context: ProxyContext, prompt: Any) -> list[str | list[int]]:
    """The prompts of a request, each as text or token ids."""
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [prompt]
    else:
        prompts = list(prompt)
    if not prompts:
        raise invalid("prompt", "must not be empty")
    for index, each in enumerate(prompts):
        field = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        if not each:
            raise invalid(field, "must not be empty")
        if isinstance(each, str):
            check_text(each, field)
        elif not all(0 <= token <= MAX_TOKEN_ID for token in each):
            raise invalid(field, "token ids must not be negative or beyond 32 bits")
        else:
            check_prompt_length(context, len(each), field)
    return prompts


def check_text(text: str, field: str) -> None:
    """Raises a 400 for text that has no UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(field, f"has an unpaired surrogate at character {error.start}") from None


async def complete_text(context: ProxyContext, run: CompletionRun) -> dict[str, Any]:
    """The whole answer as a `text_completion` object."""
    results = await collect_generations(context, run.generations)
    usage = UsageTotals()
    choices = []
    for index, result in enumerate(results):
        usage.add(run.prompt_index(index), result.usage)
        choices.append(_choice(run, index, result))
    return {
        "id": run.id,
        "object": "text_completion",
        "created": run.created,
        "model": run.model,
        "choices": choices,
        "usage": usage.to_openai(),
    }


def _choice(run: CompletionRun, index: int, result: ChoiceResult) -> dict[str, Any]:
    choice = {
        "index": index,
        "text": run.echo(index) + result.text,
        "logprobs": completion_logprobs(result.logprobs, 0)[0] if run.body.logprobs is not None else None,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
    }
    if run.body.return_token_ids:
        choice["token_ids"] = result.token_ids
        choice["prompt_token_ids"] = run.generations[index].input_ids
    return choice


async def completion_chunks(context: ProxyContext, run: CompletionRun) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events of `text_completion` objects, ended by [DONE]."""
    writer = _ChunkWriter(run)
    outputs = run_generations(context, run.generations)
    try:
        async for index, output in outputs:
            chunk = writer.chunk(index, output)
            if chunk is not None:
                yield chunk
    finally:
        await outputs.aclose()
    if writer.include_usage:
        yield writer.usage_chunk()
    yield DONE


class _ChunkWriter:
    """Turns engine outputs into chunks, remembering what was sent for each choice."""

    def __init__(self, run: CompletionRun) -> None:
        self._run = run
        self._started: set[int] = set()
        self._text_offsets: dict[int, int] = {}
        self._usage = UsageTotals()
        self._prompt_tokens: dict[int, int] = {}
        self._completion_tokens = 0
        self._continuous_usage = wants_continuous_usage(run.body)
        self.include_usage = bool(run.body.stream_options and run.body.stream_options.include_usage)

    def chunk(self, index: int, output: EngineOutput) -> bytes | None:
        """The chunk of one output; None when it changes nothing that the client sees."""
        self._completion_tokens += len(output.token_ids)
        prompt_index = self._run.prompt_index(index)
        if output.num_prompt_tokens is not None:
            self._prompt_tokens[prompt_index] = output.num_prompt_tokens
        if output.usage is not None:
            self._usage.add(prompt_index, output.usage)
        text = output.text
        if index not in self._started:
            self._started.add(index)
            text = self._run.echo(index) + text
        wants_tokens = self._run.body.return_token_ids and output.token_ids
        if not (text or output.logprobs or wants_tokens or output.finish_reason):
            return None
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, output),
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if wants_tokens:
            choice["token_ids"] = output.token_ids
        return self._chunk([choice])

    def _logprobs(self, index: int, output: EngineOutput) -> dict[str, Any] | None:
        if self._run.body.logprobs is None or not output.logprobs:
            return None
        shaped, self._text_offsets[index] = completion_logprobs(output.logprobs, self._text_offsets.get(index, 0))
        return shaped

    def usage_chunk(self) -> bytes:
        """The chunk that has the usage and no choice."""
        return self._chunk([], usage=self._usage.to_openai())

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        run = self._run
        chunk = {
            "id": run.id,
            "object": "text_completion",
            "created": run.created,
            "model": run.model,
            "choices": choices,
        }
        if self._continuous_usage and choices:
            chunk["usage"] = simple_usage(sum(self._prompt_tokens.values()), self._completion_tokens)
        elif self.include_usage:
            chunk["usage"] = None
        chunk.update(more)
        return data_event(chunk)

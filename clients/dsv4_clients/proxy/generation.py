"""Running the generations of one HTTP request and joining their outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4_clients.merge import merge_delta
from dsv4_clients.proxy.context import ProxyContext
from dsv4_clients.proxy.tasks import cancel_and_wait
from dsv4_clients.proxy.triton_client import EngineOutput, Generation

MAX_WAITING_OUTPUTS = 32


async def run_generations(
    context: ProxyContext, generations: Sequence[Generation]
) -> AsyncGenerator[tuple[int, EngineOutput], None]:
    """Outputs of all generations as they come, each with the index of its generation.

    Closing the generator cancels all of them; the first error ends all of them.
    """
    if len(generations) == 1:
        outputs = context.metrics.observe(context.client.generate(generations[0]))
        try:
            async for output in outputs:
                yield 0, output
        finally:
            await outputs.aclose()
        return
    waiting: asyncio.Queue[tuple[int, EngineOutput | Exception | None]] = asyncio.Queue(MAX_WAITING_OUTPUTS)
    tasks = [asyncio.ensure_future(_forward(context, index, each, waiting)) for index, each in enumerate(generations)]
    running = len(tasks)
    try:
        while running:
            index, output_or_error = await waiting.get()
            if output_or_error is None:
                running -= 1
            elif isinstance(output_or_error, Exception):
                raise output_or_error
            else:
                yield index, output_or_error
    finally:
        await cancel_and_wait(*tasks)


async def _forward(
    context: ProxyContext,
    index: int,
    generation: Generation,
    waiting: asyncio.Queue[tuple[int, EngineOutput | Exception | None]],
) -> None:
    """Put the outputs of one generation into the queue, then None; or the error that ended it."""
    outputs = context.metrics.observe(context.client.generate(generation))
    try:
        async for output in outputs:
            await waiting.put((index, output))
        await waiting.put((index, None))
    except Exception as error:  # noqa: BLE001 - raised again by the reader of the queue
        await waiting.put((index, error))
    finally:
        await outputs.aclose()


@dataclass
class ChoiceResult:
    """Everything one generation produced."""

    text: str = ""
    message: dict[str, Any] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, output: EngineOutput) -> None:
        """Append one engine output."""
        self.text += output.text
        if output.chat_delta:
            merge_delta(self.message, output.chat_delta)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
        if output.usage is not None:
            self.usage = output.usage


async def collect_generations(context: ProxyContext, generations: Sequence[Generation]) -> list[ChoiceResult]:
    """Run the generations to their ends."""
    results = [ChoiceResult() for _ in generations]
    outputs = run_generations(context, generations)
    try:
        async for index, output in outputs:
            results[index].add(output)
    finally:
        await outputs.aclose()
    return results

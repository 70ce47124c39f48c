"""Outputs of one request between the engine and a consumer that may be slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from dsv4.engine.chat_delta import merge_deltas
from dsv4.engine.protocol import RequestOutput, TokenLogprob

MAX_UNREAD_OUTPUTS = 64


class OutputQueue:
    """First in, first out; when more than `MAX_UNREAD_OUTPUTS` are unread they are merged into one.

    Nothing is lost, and what an idle consumer costs is bounded by the text of its request. For one event loop.
    """

    def __init__(self) -> None:
        self._unread: deque[RequestOutput] = deque()
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output."""
        self._unread.append(output)
        if len(self._unread) > MAX_UNREAD_OUTPUTS:
            merged = merge_outputs(list(self._unread))
            self._unread.clear()
            self._unread.append(merged)
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """The oldest output; waits for one."""
        while not self._unread:
            self._arrived.clear()
            await self._arrived.wait()
        return self._unread.popleft()


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one request as one; whatever is a total or marks the end comes from the last."""
    last = outputs[-1]
    deltas = [output.chat_delta for output in outputs if output.chat_delta is not None]
    logprobs: list[TokenLogprob] | None = None
    if any(output.logprobs is not None for output in outputs):
        logprobs = [entry for output in outputs for entry in output.logprobs or []]
    cumulative = [output.cumulative_logprob for output in outputs if output.cumulative_logprob is not None]
    return RequestOutput(
        request_id=last.request_id,
        token_ids=[token for output in outputs for token in output.token_ids],
        text="".join(output.text for output in outputs),
        chat_delta=merge_deltas(deltas) if deltas else None,
        logprobs=logprobs,
        cumulative_logprob=cumulative[-1] if cumulative else None,
        num_prompt_tokens=max(output.num_prompt_tokens for output in outputs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        error=last.error,
    )

"""The engine: a loop that schedules, sends one command a step, and hands out tokens."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pypto_serving.serving.server import serving_worker

logger = logging.getLogger(__name__)
GROUPS = {"ori": 4, "cmp_c4": 8}


@dataclass
class EngineConfig:
    drafts: int
    rows: int
    max_seq_len: int
    max_running: int
    profile: bool


@dataclass
class TokenOutput:
    token_id: int | None = None
    text: str = ""
    finished: bool = False
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass
class _Request:
    request_id: str
    prompt: list[int]
    options: Any
    limit: int
    eos: int | None
    output: list[int] = field(default_factory=list)
    queue: asyncio.Queue[TokenOutput] = field(default_factory=asyncio.Queue)


class _Scheduler:
    def __init__(self) -> None:
        self.requests: dict[str, _Request] = {}
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def remove(self, request: _Request) -> None:
        self.running = [other for other in self.running if other is not request]
        self.waiting = deque(other for other in self.waiting if other is not request)


class ReplicaEngineCore:
    def __init__(self, config: EngineConfig, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.scheduler = _Scheduler()
        self.kv_cache_manager = SimpleNamespace(_group_pools={})
        self._request_contexts: dict[str, _Request] = {}
        self._worker_process: Any = None
        self._output_queue: Any = None
        self._loop_task: asyncio.Task[None] | None = None
        self._batch_queue: deque[int] = deque()
        self._step_counter = 0
        self._running = False
        self._known: set[str] = set()
        self._finished: list[str] = []

    async def start(self) -> None:
        spawned = serving_worker.spawn_worker(self.config)
        self._worker_process, self._input_queue, self._output_queue, self._profile_queue, ready, blocks = spawned
        if not await asyncio.to_thread(ready.wait, 60):
            raise RuntimeError("Worker failed to initialize within 60s timeout")
        if blocks.value <= 0:
            raise RuntimeError(f"Worker reported invalid KV cache block count: {blocks.value}")
        for name, per_sequence in GROUPS.items():
            size = per_sequence * blocks.value
            self.kv_cache_manager._group_pools[name] = SimpleNamespace(
                blocks_per_partition=size,
                spec=SimpleNamespace(max_blocks_per_seq=per_sequence),
                free_queues=[list(range(size)) for _ in range(8)],
            )
        self._running = True
        self._loop_task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        self._running = False
        if self._loop_task is not None:
            await self._loop_task
        self._input_queue.put(None)
        await asyncio.to_thread(self._worker_process.join, 30)

    async def add_request(
        self, request_id: str, prompt: Any, config: Any, *, prompt_token_ids: Sequence[int]
    ) -> AsyncGenerator[TokenOutput, None]:
        room = self.config.max_seq_len - len(prompt_token_ids)
        if room <= 0:
            raise ValueError(f"Request {request_id} leaves no room for generation")
        eos = None if config.ignore_eos else self.tokenizer.eos_token_id
        request = _Request(request_id, list(prompt_token_ids), config, min(config.max_new_tokens, room), eos)
        self._request_contexts[request_id] = self.scheduler.requests[request_id] = request
        self.scheduler.waiting.append(request)
        finished = False
        try:
            while not finished:
                output = await request.queue.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                await self.abort_request(request_id)

    async def abort_request(self, request_id: str) -> None:
        request = self._request_contexts.pop(request_id, None)
        if request is None:
            return
        self._end(request)
        self.scheduler.requests.pop(request_id, None)
        request.queue.put_nowait(TokenOutput(finished=True, finish_reason="FINISHED_ABORTED"))

    async def _loop(self) -> None:
        while self._running:
            if not self.scheduler.has_work():
                await asyncio.sleep(0.001)
                continue
            # Nothing is admitted while anything decodes, so work comes in waves.
            if not self.scheduler.running:
                while self.scheduler.waiting and len(self.scheduler.running) < self.config.max_running:
                    self.scheduler.running.append(self.scheduler.waiting.popleft())
            await self._run_step(list(self.scheduler.running))

    async def _run_step(self, batch: list[_Request]) -> None:
        self._step_counter += 1
        new = {r.request_id: (r.prompt, r.options.temperature <= 0) for r in batch if r.request_id not in self._known}
        self._known.update(new)
        finished, self._finished = self._finished, []
        self._input_queue.put(
            {"step_id": self._step_counter, "new": new, "ids": [r.request_id for r in batch], "finished": finished}
        )
        self._batch_queue.append(self._step_counter)
        try:
            _, tokens, error = await asyncio.to_thread(self._output_queue.get, timeout=1200)
        except queue.Empty:
            tokens, error = {}, "timed out"
        self._batch_queue.popleft()
        if error is not None:
            logger.error("Worker returned error: %s", error)
            for request in batch:
                self._end(request)
                request.queue.put_nowait(TokenOutput(finished=True, finish_reason="error"))
            return
        for request in batch:
            if request in self.scheduler.running:
                self._deliver(request, tokens[request.request_id])

    def _deliver(self, request: _Request, tokens: list[int]) -> None:
        for token in tokens:
            request.output.append(token)
            reason = ""
            if token == request.eos:
                reason = "FINISHED_EOS"
            elif len(request.output) >= request.limit:
                reason = "FINISHED_LENGTH"
            ids = tuple(request.output) if reason else ()
            output = TokenOutput(token, "", bool(reason), reason, len(request.prompt), len(request.output), ids)
            if request.options.stream or reason:
                request.queue.put_nowait(output)
            if reason:
                self._end(request)
                return

    def _end(self, request: _Request) -> None:
        self.scheduler.remove(request)
        self._finished.append(request.request_id)


class AsyncLLMEngine:
    def __init__(self, config: EngineConfig, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._cores = [ReplicaEngineCore(config, tokenizer)]

    async def start(self) -> None:
        await self._cores[0].start()

    async def stop(self) -> None:
        await self._cores[0].stop()

    async def add_request(self, request_id: str, prompt: Any, config: Any) -> AsyncGenerator[TokenOutput, None]:
        ids = self.tokenizer.encode(prompt)
        async for output in self._cores[0].add_request(request_id, prompt, config, prompt_token_ids=ids):
            yield output

    async def abort_request(self, request_id: str) -> None:
        await self._cores[0].abort_request(request_id)

    async def start_profile(self) -> None:
        await self._profile(True)

    async def stop_profile(self) -> None:
        await self._profile(False)

    async def _profile(self, active: bool) -> None:
        core = self._cores[0]
        if not self.config.profile:
            raise RuntimeError("Profiling is not enabled; start the server with --profile")
        core._input_queue.put({"profile": active})
        await asyncio.to_thread(core._profile_queue.get, timeout=30)

"""PyPTO's NPU engine behind the verbs of ours: upstream's `AsyncLLMEngine`, guarded against what it does not guard.

Upstream tells neither a dead worker nor a stuck one, outlives its parent, mixes up requests with the same id, and fails
whole batches for one bad request. Here requests are checked before they are handed over, get ids of our own, and a
watchdog ends the engine when it is lost; whoever runs this engine's process then starts a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from dsv4.chat import ChatTokenizer
from dsv4.config import ModelConfig
from dsv4.default_model import cache_directory
from dsv4.engine.metrics import MetricsRecorder
from dsv4.engine.output_processor import OutputProcessor
from dsv4.engine.protocol import FinishReason, GenerateRequest, RequestOutput
from dsv4.engine.sampler import SampledToken
from dsv4.errors import EngineStartError, ErrorCode, RequestError, invalid_argument
from dsv4.pypto.admission import Admission, live_request_limit
from dsv4.pypto.arguments import knows_flag, upstream_arguments
from dsv4.pypto.environment import apply, upstream_environment
from dsv4.pypto.failures import UPSTREAM_LOGGER, LastError, Watchdog
from dsv4.pypto.options import PyptoOptions
from dsv4.pypto.requests import (
    Limits,
    check_prompt,
    check_sampling,
    context_limit,
    generate_fields,
    new_token_limit,
)
from dsv4.pypto.tokenizer import PassThroughTokenizer
from dsv4.pypto.upstream import Upstream, build_parser, load_upstream, parse_configuration
from dsv4.pypto.worker_process import guard_workers, kill_worker, read_reason

_logger = logging.getLogger(__name__)

FINISH_REASONS = {"FINISHED_EOS": FinishReason.STOP, "FINISHED_LENGTH": FinishReason.LENGTH}
RANKS = 8


class PyptoEngine:
    """One engine in this process, with its worker process. All methods run in the event loop that called `start`.

    An engine lives once: after `stop`, or after `lost` is set, a new one is needed.
    """

    def __init__(self, options: PyptoOptions, *, progress: Callable[[str], None] | None = None) -> None:
        self._options = options
        self._progress = progress or _logger.info
        self._state = "starting"
        self.lost_reason: str | None = None
        self.lost = asyncio.Event()
        self.metrics = MetricsRecorder()
        self._numbers = itertools.count(1)
        self._live: dict[str, asyncio.Task[None]] = {}
        self._outputs: dict[str, asyncio.Queue[_Tokens | RequestError]] = {}
        self._last_error = LastError()
        self._running = 0
        self._directory = tempfile.TemporaryDirectory(prefix="dsv4-pypto-")
        self._reason_file = Path(self._directory.name) / "worker-error"

    async def start(self) -> None:
        """Load the model and wait until it can serve.

        Raises:
            ConfigurationError: upstream's own reason to refuse the flags.
            EngineStartError: upstream is not installed, or the worker cannot start.
        """
        directory = Path(self._options.model)
        self._model = ModelConfig.from_directory(directory)
        self._tokenizer = ChatTokenizer.from_directory(directory)
        upstream = self._load_upstream()
        self._upstream = upstream
        self._limits = Limits(
            context=context_limit(self._options),
            vocabulary=min(self._model.vocab_size, self._tokenizer.vocab_size),
            speculation=self._options.speculation,
            seeded_sampling=upstream.seeded_sampling,
        )
        config = parse_configuration(upstream, upstream_arguments(self._options, upstream.parser))
        guard_workers(upstream.worker_module, self._reason_file)
        tokenizer = PassThroughTokenizer(self._tokenizer.eos_token_id, self._model.bos_token_id)
        self._engine = upstream.engine_class(config=config, tokenizer=tokenizer)
        self._core = self._engine._cores[0]
        logging.getLogger(UPSTREAM_LOGGER).addHandler(self._last_error)
        self._progress(f"pypto: starting the worker for {self._options.model}")
        began = time.monotonic()
        await self._start_worker()
        self._progress(f"pypto: ready after {time.monotonic() - began:.1f} s")
        try:
            self._admission = Admission(self._live_request_limit(), self._options.max_queued_requests)
        except AttributeError as error:
            await self._kill_worker()
            raise EngineStartError(f"this version of pypto_serving is not supported: {error}") from None
        self._watchdog = Watchdog(self._core, self._options.step_timeout_seconds)
        self._watching = asyncio.create_task(self._watch())
        self._state = "ready"

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, the last one `finished`. A failed request ends with an output that has `error`.

        Leaving the iteration early aborts the request.
        """
        began = time.monotonic()
        try:
            outputs = self._generate(request, began)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if output.finished:
                        self._count_end(output, began)
                    yield output
        except RequestError as error:
            self.metrics.count("dsv4_requests_total", labels=(error.code.value.lower(),))
            yield RequestOutput(request_id=request.request_id, error=str(error))

    async def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        queue = self._outputs.get(request_id)
        if queue is not None:
            queue.put_nowait(RequestError(ErrorCode.ABORTED, "the request was aborted"))

    async def stats(self) -> dict[str, Any]:
        """Gauges and counters, with the keys of the reference engine's."""
        groups = self._cache_groups()
        shares = [group["used_blocks"] / group["total_blocks"] for group in groups.values() if group["total_blocks"]]
        return {
            "running": self._running,
            "waiting": self._admission.num_waiting,
            "preemptions": 0,
            "cache_groups": groups,
            "kv_cache_usage": max(shares, default=0.0),
            "counters": self.metrics.counters(),
        }

    async def health(self) -> dict[str, Any]:
        """Answered without the worker's help."""
        return {
            "ready": self._state == "ready",
            "state": self._state,
            "reason": self.lost_reason,
            "running": self._running,
            "waiting": self._admission.num_waiting if self._state == "ready" else 0,
            "last_step_age_seconds": self.step_age(),
            "max_model_len": self._options.max_model_len,
        }

    def load(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return self._running, self._admission.num_waiting if self._state == "ready" else 0

    def step_age(self) -> float:
        """Seconds since the last step ended while requests run, else 0."""
        return round(self._watchdog.step_age(), 3) if self._state == "ready" else 0.0

    async def profile(self, action: str) -> None:
        """Start or stop a profile window in the worker. Raises RequestError UNSUPPORTED without `--profile`."""
        if action not in ("start", "stop"):
            raise invalid_argument("profile", f"must be 'start' or 'stop', got {action!r}")
        try:
            await getattr(self._engine, f"{action}_profile")()
        except RuntimeError as error:
            raise RequestError(ErrorCode.UNSUPPORTED, f"profile: {error}") from None

    async def stop(self) -> None:
        """End all requests and the worker. Never raises, never hangs."""
        if self._state in ("starting", "stopped"):
            return
        lost, self._state = self._state == "lost", "stopped"
        self._watching.cancel()
        if lost:
            return
        await self._end_requests(RequestError(ErrorCode.DRAINING, "the server is shutting down"))
        try:
            await asyncio.wait_for(self._engine.stop(), self._options.stop_timeout_seconds)
        except Exception as error:  # noqa: BLE001 - upstream re-raises what ended its loop before it ends the worker
            _logger.warning("pypto: the engine did not stop orderly (%r); ending its worker", error)
        await self._kill_worker()

    def _load_upstream(self) -> Upstream:
        """Prepare the environment first: some of it is read when upstream's modules are imported."""
        parser = build_parser()
        build_directory = cache_directory() / "pypto-build"
        build_directory.mkdir(parents=True, exist_ok=True)
        changes = upstream_environment(
            os.environ,
            self._options,
            ring_flags=knows_flag(parser, "--ring-heap"),
            build_directory=build_directory,
        )
        apply(os.environ, changes)
        # The default is whatever `python3` comes first on PATH where the interpreter is embedded.
        multiprocessing.set_executable(sys.executable)
        return load_upstream()

    async def _start_worker(self) -> None:
        """Upstream's own `start`, with a look at the worker meanwhile: a dead one would be waited for half an hour."""
        starting = asyncio.create_task(self._engine.start())
        try:
            while not starting.done():
                await asyncio.wait([starting], timeout=self._options.poll_seconds)
                process = self._core._worker_process
                if not starting.done() and process is not None and not process.is_alive():
                    raise RuntimeError(f"it ended with exit code {process.exitcode}")
            await starting
        except (RuntimeError, ValueError, OSError) as error:
            starting.cancel()
            await self._kill_worker()
            reason = read_reason(self._reason_file) or str(error)
            raise EngineStartError(f"the PyPTO worker could not load the model: {reason}") from None
        except BaseException:
            starting.cancel()
            await self._kill_worker()
            raise

    def _live_request_limit(self) -> int:
        slots = None
        pools = list(self._group_pools().values())
        if pools:
            slots = min(pool.blocks_per_partition // pool.spec.max_blocks_per_seq for pool in pools)
        limit = live_request_limit(self._options, ranks=RANKS, slots_per_rank=slots)
        if limit < self._options.max_num_seqs:
            remedy = "; --no-enable-prefix-caching allows more" if self._options.prefix_caching else ""
            _logger.warning(
                "pypto: at most %d requests run at once, not --max-num-seqs %d: the decode rows and cache slots of one "
                "rank%s",
                limit,
                self._options.max_num_seqs,
                remedy,
            )
        return limit

    def _group_pools(self) -> dict[str, Any]:
        return getattr(self._core.kv_cache_manager, "_group_pools", {})

    def _cache_groups(self) -> dict[str, dict[str, int]]:
        groups = {}
        for name, pool in self._group_pools().items():
            total = pool.blocks_per_partition * len(pool.free_queues)
            groups[name] = {"total_blocks": total, "used_blocks": total - sum(len(free) for free in pool.free_queues)}
        return groups

    async def _generate(self, request: GenerateRequest, began: float) -> AsyncGenerator[RequestOutput, None]:
        self._require_ready()
        prompt = self._prompt(request)
        parameters = request.sampling_parameters
        check_prompt(prompt, self._limits)
        check_sampling(parameters, self._limits)
        max_tokens = new_token_limit(parameters, len(prompt), self._limits)
        processor = OutputProcessor(
            request,
            self._tokenizer,
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            eos_token_ids=frozenset(self._model.eos_token_id),
        )
        deadline = None if request.timeout_seconds is None else began + request.timeout_seconds
        queue: asyncio.Queue[_Tokens | RequestError] = asyncio.Queue()
        if request.request_id in self._outputs:
            raise invalid_argument("request_id", f"{request.request_id!r} is already running")
        self._outputs[request.request_id] = queue
        pump = asyncio.create_task(self._pump(request, prompt, max_tokens, queue, began))
        try:
            while True:
                tokens = await _next_tokens(queue, deadline)
                output = processor.push([SampledToken(token) for token in tokens.ids])
                if tokens.reason is not None and not output.finished:
                    raise self._unexpected_end(tokens.reason)
                if output.finished or output.token_ids:
                    yield output
                if output.finished:
                    return
        finally:
            self._outputs.pop(request.request_id, None)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    def _prompt(self, request: GenerateRequest) -> Sequence[int]:
        if (request.prompt_token_ids is None) == (request.prompt_text is None):
            raise invalid_argument("text_input", "give exactly one of text_input and input_ids")
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        assert request.prompt_text is not None
        return self._tokenizer.encode_text(request.prompt_text) or [self._model.bos_token_id]

    async def _pump(
        self,
        request: GenerateRequest,
        prompt: Sequence[int],
        max_tokens: int,
        queue: asyncio.Queue[_Tokens | RequestError],
        began: float,
    ) -> None:
        """Wait for a place, then carry upstream's outputs into the queue. Being cancelled aborts the request there."""
        try:
            async with self._admission.place(request.sampling_parameters.priority):
                self._running += 1
                self.metrics.observe("dsv4_queue_seconds", time.monotonic() - began)
                try:
                    await self._run(request, prompt, max_tokens, queue, began)
                finally:
                    self._running -= 1
        except RequestError as error:
            queue.put_nowait(error)
        except ValueError as error:
            queue.put_nowait(invalid_argument("input_ids", str(error)))

    async def _run(
        self,
        request: GenerateRequest,
        prompt: Sequence[int],
        max_tokens: int,
        queue: asyncio.Queue[_Tokens | RequestError],
        began: float,
    ) -> None:
        upstream_id = f"dsv4-{next(self._numbers)}"
        fields = generate_fields(request.sampling_parameters, max_tokens, self._upstream.generate_fields)
        config = self._upstream.generate_config(**fields)
        if self._upstream.prompt_ids_parameter:
            outputs = self._engine.add_request(upstream_id, "", config, prompt_token_ids=list(prompt))
        else:
            outputs = self._engine.add_request(upstream_id, list(prompt), config)
        last = None
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    now = time.monotonic()
                    ids = [] if output.token_id is None else [output.token_id]
                    if ids:
                        self._observe_token(now, last, began)
                        last = now
                    queue.put_nowait(_Tokens(ids, output.finish_reason if output.finished else None))
        finally:
            # Upstream keeps finished requests for ever and walks all of them for each new one.
            self._core._request_contexts.pop(upstream_id, None)
            self._core.scheduler.requests.pop(upstream_id, None)

    def _observe_token(self, now: float, last: float | None, began: float) -> None:
        if last is None:
            self.metrics.observe("dsv4_time_to_first_token_seconds", now - began)
        else:
            self.metrics.observe("dsv4_inter_token_seconds", now - last)

    def _unexpected_end(self, reason: str) -> RequestError:
        """Upstream ended a request that had more to come."""
        if reason == "FINISHED_ABORTED":
            return RequestError(ErrorCode.ABORTED, "the request was aborted")
        if reason in FINISH_REASONS:
            return RequestError(ErrorCode.INTERNAL, f"the PyPTO engine ended the request early ({reason})")
        return self._last_error.as_request_error()

    def _count_end(self, output: RequestOutput, began: float) -> None:
        usage = output.usage
        if usage is not None:
            self.metrics.count("dsv4_prompt_tokens_total", usage.prompt_tokens)
            self.metrics.count("dsv4_generation_tokens_total", usage.completion_tokens)
            self.metrics.count("dsv4_reasoning_tokens_total", usage.reasoning_tokens)
        self.metrics.observe("dsv4_e2e_seconds", time.monotonic() - began)
        outcome = "error" if output.finish_reason is None else output.finish_reason.value
        self.metrics.count("dsv4_requests_total", labels=(outcome,))

    def _require_ready(self) -> None:
        if self._state == "stopped":
            raise RequestError(ErrorCode.DRAINING, "the server is shutting down")
        if self._state != "ready":
            raise RequestError(ErrorCode.ENGINE_DEAD, f"the PyPTO engine is not running ({self.lost_reason})")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._options.poll_seconds)
            reason = self._watchdog.reason()
            if reason is not None:
                await self._lose(reason)
                return

    async def _lose(self, reason: str) -> None:
        """The engine is gone: tell every request, free the devices, let the process end."""
        self._state, self.lost_reason = "lost", reason
        _logger.error("pypto: %s", reason)
        error = RequestError(ErrorCode.ENGINE_DEAD, f"the PyPTO engine is lost: {reason}")
        for queue in self._outputs.values():
            queue.put_nowait(error)
        await self._kill_worker()
        self.lost.set()

    async def _end_requests(self, error: RequestError) -> None:
        for queue in list(self._outputs.values()):
            queue.put_nowait(error)
        while self._outputs:
            await asyncio.sleep(0.01)

    async def _kill_worker(self) -> None:
        process = self._core._worker_process
        loop_task = getattr(self._core, "_loop_task", None)
        if loop_task is not None:
            # What it ends with now tells nothing, and must not be the last line of the log.
            loop_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        # A thread of upstream's waits for results with a long timeout, and this process cannot end before it.
        results = self._core._output_queue
        if results is not None:
            results.put(b"")
        await asyncio.to_thread(kill_worker, process)


class _Tokens:
    """Ids of one step, and why upstream ended the request if it did."""

    __slots__ = ("ids", "reason")

    def __init__(self, ids: list[int], reason: str | None) -> None:
        self.ids = ids
        self.reason = reason


async def _next_tokens(queue: asyncio.Queue[_Tokens | RequestError], deadline: float | None) -> _Tokens:
    """What has arrived, merged: a speculative step yields its tokens one by one, back to back.

    Raises RequestError: what was put into the queue, or DEADLINE.
    """
    remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
    try:
        item = await asyncio.wait_for(queue.get(), remaining)
    except asyncio.TimeoutError:
        raise RequestError(ErrorCode.DEADLINE, "the request took longer than its timeout") from None
    if isinstance(item, RequestError):
        raise item
    merged = _Tokens(list(item.ids), item.reason)
    while merged.reason is None and not queue.empty():
        following = queue.get_nowait()
        if isinstance(following, RequestError):
            raise following
        merged.ids += following.ids
        merged.reason = following.reason
    return merged

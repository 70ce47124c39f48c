"""The engine: requests in, steps, outputs out. Synchronous and single-threaded; whoever drives it does the waiting."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dsv4.chat import ChatTokenizer
from dsv4.engine.faults import Faults
from dsv4.engine.local_executor import RowsResult
from dsv4.engine.metrics import MetricsRecorder
from dsv4.engine.output_processor import OutputProcessor
from dsv4.engine.profiler import Profiler
from dsv4.engine.protocol import GenerateRequest, RequestOutput
from dsv4.engine.sampler import Sampler
from dsv4.engine.structured_output import GrammarCompiler, OutputConstraint
from dsv4.errors import ErrorCode, RequestError, invalid_argument
from dsv4.sampling_parameters import SamplingParameters, unsupported
from dsv4.scheduler.request import Request, RequestStatus
from dsv4.scheduler.scheduler import Scheduler, StepPlan

_logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs the rows of a step."""

    def execute(self, plan: StepPlan, samplers: dict[str, Sampler]) -> list[RowsResult]:
        """One result a request, in the order of the plan."""


@dataclass(frozen=True)
class ModelFacts:
    """What the engine must know of the model besides the executor."""

    vocab_size: int
    bos_token_id: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    num_speculative_tokens: int


@dataclass
class _Live:
    """A request between `add` and its last output."""

    request: Request
    sampler: Sampler
    output: OutputProcessor
    submitted: float
    first_scheduled: float | None = None
    last_token: float | None = None


class EngineCore:
    """Owns the scheduler, the executor and the output side of all live requests.

    Args:
        seed: of sampled requests that bring none; None draws a new one for each.
        default_timeout: seconds until the deadline of requests that bring none.
        clock: gives monotonic seconds.
    """

    def __init__(
        self,
        facts: ModelFacts,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: ChatTokenizer | None,
        *,
        seed: int | None = None,
        default_timeout: float | None = None,
        profile_directory: Path | None = None,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._scheduler = scheduler
        self._executor = executor
        self._tokenizer = tokenizer
        self._seed = seed
        self._default_timeout = default_timeout
        self._grammars: GrammarCompiler | None = None
        if tokenizer is not None:
            self._grammars = GrammarCompiler(tokenizer, vocab_size=facts.vocab_size, stop_token_ids=facts.eos_token_ids)
        self._profiler = Profiler(profile_directory)
        self._faults = faults or Faults()
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._added = 0
        self.metrics = MetricsRecorder()

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        return self._facts.max_model_len

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def compile_grammar(self, request: GenerateRequest) -> OutputConstraint | None:
        """The constraint of a request's output, for `add`. Takes up to seconds; may be called from any thread.

        Raises RequestError for a constraint that cannot be compiled.
        """
        structured_outputs = request.sampling_parameters.structured_outputs
        if structured_outputs is None:
            return None
        if self._grammars is None:
            raise unsupported("structured_outputs", "the model has no tokenizer.json, so text cannot be constrained")
        return self._grammars.compile(structured_outputs)

    def add(self, request: GenerateRequest, constraint: OutputConstraint | None = None) -> None:
        """Queue a request. Raises RequestError when it cannot be served.

        `constraint` is the result of `compile_grammar`; without one a request that needs it compiles it here.
        """
        try:
            self._add(request, constraint or self.compile_grammar(request))
        except RequestError as error:
            self.metrics.count("dsv4_requests_total", labels=(error.code.value.lower(),))
            raise

    def abort(self, request_id: str) -> None:
        """End a request without an output; unknown ids are ignored."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._scheduler.finish(live.request)
            self.metrics.count("dsv4_requests_total", labels=("aborted",))

    def abort_all(self, error: RequestError) -> list[RequestOutput]:
        """End every request with an error."""
        return [self._fail(live, error) for live in list(self._live.values())]

    def step(self) -> list[RequestOutput]:
        """Run one step. Outputs of requests that have something new, at most one each."""
        outputs = self._expire()
        plan = self._scheduler.schedule()
        if not plan.rows:
            return outputs
        started = self._clock()
        self._note_scheduled(plan, started)
        self._faults.before_step()
        samplers = {row.request.request_id: self._live[row.request.request_id].sampler for row in plan.rows}
        results, failures = self._execute(plan, samplers)
        outputs.extend(self._fail(self._live[request_id], error) for request_id, error in failures)
        now = self._clock()
        self.metrics.count("dsv4_steps_total")
        self.metrics.observe("dsv4_step_seconds", now - started)
        outputs.extend(output for result in results if (output := self._take(result, now)) is not None)
        return outputs

    def stats(self) -> dict[str, Any]:
        """Gauges and counters, by metric name; `running` and `waiting` also in short."""
        use = self._scheduler.allocator.use()
        return {
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_waiting,
            "preemptions": self._scheduler.num_preemptions,
            "cache_groups": {
                name: {"total_blocks": group.total, "used_blocks": group.used, "cached_blocks": group.cached}
                for name, group in use.items()
            },
            "kv_cache_usage": max((group.used / group.total for group in use.values() if group.total), default=0.0),
            "counters": self.metrics.counters(),
        }

    def warm_up(self) -> None:
        """Generate two tokens for nobody: the first calls of the network are slow. Counts as nothing."""
        self.add(
            GenerateRequest(
                request_id="warm-up",
                prompt_token_ids=[self._facts.bos_token_id],
                sampling_parameters=SamplingParameters(max_tokens=2, ignore_eos=True),
            )
        )
        faults, self._faults = self._faults, Faults()
        while self.has_work:
            self.step()
        self._faults, self.metrics = faults, MetricsRecorder()

    def profile(self, action: str) -> None:
        """`start` or `stop` a trace. Raises RequestError UNSUPPORTED without a profile directory."""
        if action == "start":
            self._profiler.start()
        elif action == "stop":
            self._profiler.stop()
        else:
            raise invalid_argument("profile", f"must be start or stop, got {action!r}")

    def _execute(
        self, plan: StepPlan, samplers: dict[str, Sampler]
    ) -> tuple[list[RowsResult], list[tuple[str, RequestError]]]:
        """Run a plan. If it fails, run its requests one by one, so that only those at fault end.

        Caches are addressed by position and tokens are drawn by index, so computing rows again changes nothing.
        """
        try:
            return self._executor.execute(plan, samplers), []
        except Exception:
            _logger.exception("a step of %d requests failed", len(plan.rows))
        results: list[RowsResult] = []
        failures: list[tuple[str, RequestError]] = []
        for rows in plan.rows:
            request_id = rows.request.request_id
            try:
                results += self._executor.execute(StepPlan([rows]), {request_id: samplers[request_id]})
            except RequestError as error:
                failures.append((request_id, error))
            except Exception:
                _logger.exception("request %s failed on its own", request_id)
                message = "the network failed on this request; the server's log has the reason"
                failures.append((request_id, RequestError(ErrorCode.INTERNAL, message)))
        return results, failures

    def _add(self, request: GenerateRequest, constraint: OutputConstraint | None) -> None:
        parameters = request.sampling_parameters
        if parameters.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", "this engine does not return log probabilities of the prompt")
        prompt = self._prompt(request)
        self._check_token_parameters(parameters)
        length = len(prompt)
        room = self._facts.max_model_len - length
        if room < 1:
            raise invalid_argument(
                "input_ids" if request.prompt_token_ids is not None else "text_input",
                f"the prompt has {length} tokens, max_model_len is {self._facts.max_model_len}, "
                "so no token can be generated; shorten the prompt",
            )
        max_tokens = min(parameters.max_tokens or room, room)
        output = OutputProcessor(
            request,
            self._tokenizer,
            num_prompt_tokens=length,
            max_tokens=max_tokens,
            eos_token_ids=self._facts.eos_token_ids,
        )
        stops = self._facts.eos_token_ids.union(parameters.stop_token_ids)
        now = self._clock()
        timeout = self._default_timeout if request.timeout_seconds is None else request.timeout_seconds
        scheduled = Request(
            request_id=request.request_id,
            token_ids=list(prompt),
            num_prompt_tokens=length,
            max_total_tokens=length + max_tokens,
            num_speculative_tokens=self._facts.num_speculative_tokens,
            priority=parameters.priority,
            deadline=None if timeout is None else now + timeout,
        )
        self._scheduler.add(scheduled)
        seed = self._seed_of(parameters)
        sampler = Sampler(parameters, prompt, stop_token_ids=stops, seed=seed, constraint=constraint)
        self._live[request.request_id] = _Live(scheduled, sampler, output, now)
        self._added += 1

    def _seed_of(self, parameters: SamplingParameters) -> int:
        if parameters.seed is not None:
            return parameters.seed
        return secrets.randbits(63) if self._seed is None else hash((self._seed, self._added))

    def _prompt(self, request: GenerateRequest) -> Sequence[int]:
        ids = request.prompt_token_ids
        if (ids is None) == (request.prompt_text is None):
            raise invalid_argument("text_input", "give exactly one of text_input and input_ids")
        if ids is None:
            if self._tokenizer is None:
                raise unsupported("text_input", "the model has no tokenizer.json; send input_ids")
            assert request.prompt_text is not None
            return self._tokenizer.encode_text(request.prompt_text) or [self._facts.bos_token_id]
        if not ids:
            raise invalid_argument("input_ids", "must not be empty")
        for token in (min(ids), max(ids)):
            if not 0 <= token < self._facts.vocab_size:
                raise invalid_argument(
                    "input_ids", f"token {token} is outside the vocabulary of {self._facts.vocab_size}"
                )
        return ids

    def _check_token_parameters(self, parameters: SamplingParameters) -> None:
        vocabulary = self._facts.vocab_size
        for token in parameters.stop_token_ids:
            if token >= vocabulary:
                raise invalid_argument("stop_token_ids", f"{token} is outside the vocabulary of {vocabulary}")
        for text in parameters.logit_bias or {}:
            if int(text) >= vocabulary:
                raise invalid_argument("logit_bias", f"{text} is outside the vocabulary of {vocabulary}")

    def _expire(self) -> list[RequestOutput]:
        now = self._clock()
        error = RequestError(ErrorCode.DEADLINE, "the request's deadline passed")
        return [self._fail(self._live[request.request_id], error) for request in self._scheduler.expired(now)]

    def _note_scheduled(self, plan: StepPlan, now: float) -> None:
        for rows in plan.rows:
            live = self._live[rows.request.request_id]
            if live.first_scheduled is None:
                live.first_scheduled = now
                live.output.cached_tokens = rows.request.num_cached_tokens
                self.metrics.count("dsv4_prefix_cache_query_tokens_total", rows.request.num_prompt_tokens)
                self.metrics.count("dsv4_prefix_cache_hit_tokens_total", rows.request.num_cached_tokens)
                self.metrics.observe("dsv4_queue_seconds", now - live.submitted)
        self.metrics.count("dsv4_preemptions_total", len(plan.preempted))

    def _take(self, result: RowsResult, now: float) -> RequestOutput | None:
        live = self._live.get(result.rows.request.request_id)
        if live is None:
            return None
        if result.error is not None:
            return self._fail(live, result.error)
        self._scheduler.update(result.rows, result.token_ids, result.draft_token_ids)
        if not result.tokens:
            return None
        self._count_drafts(live, result)
        output = live.output.push(result.tokens)
        self._time_tokens(live, len(output.token_ids), now)
        if output.finished:
            self._finish(live, output, now)
        return output

    def _count_drafts(self, live: _Live, result: RowsResult) -> None:
        drafts, accepted = len(result.rows.draft_token_ids), len(result.tokens) - 1
        live.output.draft_tokens += drafts
        live.output.accepted_draft_tokens += accepted
        for position in range(drafts):
            self.metrics.count("dsv4_mtp_draft_tokens_total", labels=(str(position + 1),))
            if position < accepted:
                self.metrics.count("dsv4_mtp_accepted_tokens_total", labels=(str(position + 1),))

    def _time_tokens(self, live: _Live, count: int, now: float) -> None:
        self.metrics.count("dsv4_generation_tokens_total", count)
        if live.last_token is None:
            self.metrics.observe("dsv4_time_to_first_token_seconds", now - live.submitted)
        else:
            for _ in range(count):
                self.metrics.observe("dsv4_inter_token_seconds", (now - live.last_token) / count)
        live.last_token = now

    def _finish(self, live: _Live, output: RequestOutput, now: float) -> None:
        self._remove(live)
        outcome = output.finish_reason.value if output.finish_reason is not None else "internal"
        self.metrics.count("dsv4_requests_total", labels=(outcome,))
        self.metrics.observe("dsv4_e2e_seconds", now - live.submitted)
        if output.usage is not None:
            self.metrics.count("dsv4_prompt_tokens_total", output.usage.prompt_tokens)
            self.metrics.count("dsv4_reasoning_tokens_total", output.usage.reasoning_tokens)

    def _fail(self, live: _Live, error: RequestError) -> RequestOutput:
        self._remove(live)
        self.metrics.count("dsv4_requests_total", labels=(error.code.value.lower(),))
        return RequestOutput(request_id=live.request.request_id, error=str(error))

    def _remove(self, live: _Live) -> None:
        del self._live[live.request.request_id]
        if live.request.status is not RequestStatus.FINISHED:
            self._scheduler.finish(live.request)

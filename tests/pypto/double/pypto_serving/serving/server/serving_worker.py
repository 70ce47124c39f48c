"""The worker process: holds the state of each request, answers one command with one result."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

from pypto_serving import chain

logger = logging.getLogger(__name__)
BLOCKS = 24


def spawn_worker(config: Any) -> tuple[Any, ...]:
    context = multiprocessing.get_context("spawn")
    commands, results, profiles = context.Queue(), context.Queue(), context.Queue()
    ready, blocks = context.Event(), context.Value("i", 0)
    process = context.Process(target=_worker_entry, args=(config, commands, results, ready, blocks, profiles))
    process.start()
    return process, commands, results, profiles, ready, blocks


def _worker_entry(config: Any, commands: Any, results: Any, ready: Any, blocks: Any, profiles: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    try:
        if os.environ.get("DOUBLE_INIT_EXIT"):
            os._exit(9)
        if os.environ.get("DOUBLE_INIT_FAIL"):
            raise RuntimeError("no weights for you")
        blocks.value = BLOCKS
        ready.set()
        _Worker(config).run(commands, results, profiles)
    except Exception as error:  # noqa: BLE001 - as upstream does
        logger.error("Worker process failed: %s", error)
        ready.set()


class _Worker:
    def __init__(self, config: Any) -> None:
        self._config = config
        self._states: dict[str, int] = {}
        self._pending: dict[str, int] = {}
        self._greedy: dict[str, bool] = {}
        self._steps = 0

    def run(self, commands: Any, results: Any, profiles: Any) -> None:
        while (command := commands.get()) is not None:
            if "profile" in command:
                profiles.put(command["profile"])
                continue
            try:
                tokens, error = self._step(command), None
            except RuntimeError as failure:
                tokens, error = {}, str(failure)
            for request_id in command["finished"]:
                self._states.pop(request_id, None)
            results.put((command["step_id"], tokens, error))

    def _step(self, command: dict[str, Any]) -> dict[str, list[int]]:
        for request_id, (prompt, greedy) in command["new"].items():
            state = 0
            for token in prompt:
                state = chain.absorb(state, token)
            self._states[request_id], self._greedy[request_id] = state, greedy
        if not command["ids"]:
            return {}
        self._fault()
        if self._config.drafts and not all(self._greedy[request_id] for request_id in command["ids"]):
            raise RuntimeError("MTP decoding is greedy")
        return {request_id: self._tokens(request_id, request_id in command["new"]) for request_id in command["ids"]}

    def _tokens(self, request_id: str, first: bool) -> list[int]:
        """One token for a prompt, else as many as a speculative step accepts."""
        state = self._states[request_id]
        count = 1 if first else 1 + (state >> 16) % (self._config.drafts + 1)
        tokens = []
        for _ in range(count):
            token = chain.following(state)
            tokens.append(token)
            state = chain.absorb(state, token)
        self._states[request_id] = state
        return tokens

    def _fault(self) -> None:
        self._steps += 1
        time.sleep(float(os.environ.get("DOUBLE_DECODE_MS", "0")) / 1000)
        if self._steps == int(os.environ.get("DOUBLE_FAIL_AT", "0")):
            raise RuntimeError("AclrtSynchronizeStreamWithTimeout failed, error 507034")
        if self._steps == int(os.environ.get("DOUBLE_EXIT_AT", "0")):
            os._exit(9)
        if self._steps == int(os.environ.get("DOUBLE_HANG_AT", "0")):
            time.sleep(float(os.environ.get("DOUBLE_HANG_S", "600")))

"""What the load generator sends, and when."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsv4.errors import ConfigurationError

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions"}

_WORDS = (
    *("river", "stone", "light", "window", "garden", "paper", "music", "winter", "market", "bridge", "yellow"),
    *("copper", "silent", "moving", "narrow", "early", "letter", "island", "corner", "metal", "forest", "signal"),
    *("pocket", "summer", "planet", "engine", "mirror", "shadow", "valley", "thread"),
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`request_rate` is in requests a second, with Poisson arrivals; None sends as `concurrency` allows."""

    base_url: str
    api_key: str | None = None
    model: str | None = None
    endpoint: Endpoint = "chat"
    requests: int = 100
    concurrency: int = 8
    request_rate: float | None = None
    input_words: int = 64
    output_tokens: int = 64
    ignore_eos: bool = True
    temperature: float = 0.0
    dataset: Path | None = None
    seed: int = 0

    def bodies(self) -> Iterator[dict[str, Any]]:
        """One request body for each request. Raises ConfigurationError for a broken data set."""
        numbers = random.Random(self.seed)
        prompts = _read_dataset(self.dataset) if self.dataset is not None else None
        for index in range(self.requests):
            prompt = prompts[index % len(prompts)] if prompts else _synthetic_prompt(numbers, self.input_words)
            yield self._body(prompt)

    def _body(self, prompt: str | list[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
            "stream_options": {"include_usage": True},
        }
        if self.model is not None:
            body["model"] = self.model
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        elif isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            raise ConfigurationError("--dataset: conversations need the chat endpoint")
        return body

    def arrival_delays(self) -> Iterator[float]:
        """Seconds between one request and the next; zeros without a rate."""
        numbers = random.Random(self.seed + 1)
        while True:
            yield 0.0 if self.request_rate is None else numbers.expovariate(self.request_rate)


def _synthetic_prompt(numbers: random.Random, words: int) -> str:
    """Random words: prompts differ from the first word on, so that a prefix cache does not help."""
    return " ".join(numbers.choices(_WORDS, k=max(words, 1)))


def _read_dataset(path: Path) -> list[str | list[dict[str, Any]]]:
    """JSON lines with `prompt` (text) or `messages` (a conversation)."""
    prompts: list[str | list[dict[str, Any]]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"--dataset: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigurationError(f"--dataset: line {number}: {error}") from None
        prompt = record.get("messages") or record.get("prompt") if isinstance(record, dict) else None
        if not isinstance(prompt, (str, list)):
            raise ConfigurationError(f"--dataset: line {number} has neither prompt nor messages")
        prompts.append(prompt)
    if not prompts:
        raise ConfigurationError(f"--dataset: {path} is empty")
    return prompts

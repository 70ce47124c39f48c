"""Token counts of a request over all its choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UsageTotals:
    """Adds up the usage of several generations; the choices of one prompt count the prompt once."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.draft_tokens = 0
        self.accepted_draft_tokens = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached_tokens.values())

    def add(self, prompt_index: int, usage: Mapping[str, Any]) -> None:
        """Add the engine's usage of one finished choice."""
        self._prompt_tokens[prompt_index] = usage.get("prompt_tokens", 0)
        prompt_details = usage.get("prompt_tokens_details") or usage
        completion_details = usage.get("completion_tokens_details") or usage
        self._cached_tokens[prompt_index] = prompt_details.get("cached_tokens") or 0
        self.completion_tokens += usage.get("completion_tokens", 0)
        self.reasoning_tokens += completion_details.get("reasoning_tokens") or 0
        self.draft_tokens += usage.get("draft_tokens") or 0
        self.accepted_draft_tokens += usage.get("accepted_draft_tokens") or 0

    def to_openai(self) -> dict[str, Any]:
        """OpenAI's usage object. Accepted MTP drafts are reported as OpenAI reports predicted outputs."""
        completion_details = {"reasoning_tokens": self.reasoning_tokens}
        if self.draft_tokens:
            completion_details["accepted_prediction_tokens"] = self.accepted_draft_tokens
            completion_details["rejected_prediction_tokens"] = self.draft_tokens - self.accepted_draft_tokens
        return {
            **simple_usage(self.prompt_tokens, self.completion_tokens),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": completion_details,
        }


def simple_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The three counts that every usage object starts with."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }

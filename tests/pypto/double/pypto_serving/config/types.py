"""Options of one generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerateConfig:
    """Upstream's defaults, which are not greedy."""

    max_new_tokens: int = 256
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    ignore_eos: bool = False

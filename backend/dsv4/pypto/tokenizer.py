"""What upstream's engine asks of a tokenizer, without tokenising: prompts are ids already, text is made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence


class PassThroughTokenizer:
    """Hands lists of ids on and decodes nothing, so upstream neither tokenises nor detokenises on its event loop."""

    def __init__(self, eos_token_id: int, bos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = bos_token_id
        self.pad_token_id: int | None = None

    def encode(self, prompt: Sequence[int]) -> list[int]:
        """The ids themselves; an empty prompt stays empty."""
        return list(prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Always empty: detokenising, stop strings and parsing happen in our output processor."""
        return ""

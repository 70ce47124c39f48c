"""The deterministic continuation: each token depends on every earlier one."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

END, FIRST_BYTE = 1, 3
LETTERS = b"abcdefghijklmnopqrstuvwxyz    "


def absorb(state: int, token: int) -> int:
    """State after one more token."""
    return zlib.crc32(token.to_bytes(4, "little"), state)


def following(state: int) -> int:
    """The token that follows a state; one in `DOUBLE_EOS_MOD` ends the sentence."""
    modulus = int(os.environ.get("DOUBLE_EOS_MOD", "0"))
    if modulus and (state >> 8) % modulus == 0:
        return END
    return FIRST_BYTE + LETTERS[state % len(LETTERS)]


def reference(prompt: Sequence[int], count: int, *, ignore_eos: bool = False) -> list[int]:
    """What a right engine generates."""
    state = 0
    for token in prompt:
        state = absorb(state, token)
    output: list[int] = []
    while len(output) < count:
        token = following(state)
        output.append(token)
        if token == END and not ignore_eos:
            break
        state = absorb(state, token)
    return output

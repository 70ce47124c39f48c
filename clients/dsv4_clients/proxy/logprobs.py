"""The engine's log probabilities in the shapes of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def chat_logprobs(entries: Sequence[dict[str, Any]], alternatives: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion, with at most `alternatives` top_logprobs a token."""
    return {
        "content": [
            {
                **_token(entry["token"], entry["logprob"]),
                "top_logprobs": [_token(token, logprob) for _, token, logprob in entry.get("top", ())][:alternatives],
            }
            for entry in entries
        ]
    }


def _token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8"))}


def completion_logprobs(entries: Sequence[dict[str, Any]], text_offset: int) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of a text completion, and the text offset after these tokens."""
    offsets = []
    for entry in entries:
        offsets.append(text_offset)
        text_offset += len(entry["token"])
    shaped = {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{token: logprob for _, token, logprob in entry.get("top", ())} for entry in entries],
        "text_offset": offsets,
    }
    return shaped, text_offset

"""Server-Sent Events in OpenAI's form."""

from __future__ import annotations

from typing import Any

import msgspec

from dsv4_clients.proxy.errors import ApiError

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def data_event(value: Any) -> bytes:
    """An event without a name: `data: {json}`."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """An event with a name, as Anthropic's API and OpenAI's responses API send them."""
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The end of a stream that failed after its first byte."""
    return data_event(error.body()) + DONE

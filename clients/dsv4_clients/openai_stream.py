"""A small OpenAI client for streams: works with any server that speaks chat completions or completions."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
from dsv4.errors import Dsv4Error


class ServerError(Dsv4Error):
    """The server refused the request or broke off the stream. `status` is None for an error inside a stream."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def make_client(base_url: str, api_key: str | None, *, connections: int = 100) -> httpx.AsyncClient:
    """A client whose streams may be silent for a long time, because prefills are."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(
        base_url=base_url.rstrip("/"),
        headers=headers,
        timeout=httpx.Timeout(None, connect=10.0),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        trust_env=False,
    )


async def stream_events(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Chunks of a streamed completion, as the server sends them.

    Closing the generator closes the connection, which cancels the request. Raises ServerError, also when the stream
    ends without [DONE].
    """
    try:
        async with client.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise ServerError(_error_text(await response.aread(), response.status_code), response.status_code)
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if chunk.get("error"):
                    raise ServerError(str(chunk["error"].get("message") or chunk["error"]))
                yield chunk
    except httpx.HTTPError as error:
        raise ServerError(f"{client.base_url}: {error or type(error).__name__}") from None
    raise ServerError("the stream ended without [DONE]")


def _error_text(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body[:200].decode('utf-8', 'replace')}"

"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsv4_clients.proxy.chat_completion import chat_chunks, complete_chat, prepare_chat
from dsv4_clients.proxy.context import ProxyContext, context_of, trace_metadata
from dsv4_clients.proxy.disconnect import run_until_disconnect
from dsv4_clients.proxy.event_stream import open_event_stream
from dsv4_clients.proxy.http_json import GENERATION_ERRORS, json_response, with_event_stream
from dsv4_clients.proxy.schemas.chat import ChatCompletion, ChatCompletionRequest
from dsv4_clients.proxy.sse import error_event

router = APIRouter(tags=["chat"])
Metadata = tuple[tuple[str, str], ...]


@router.post(
    "/v1/chat/completions",
    response_class=Response,
    responses={200: with_event_stream(ChatCompletion, "`chat.completion.chunk` events"), **GENERATION_ERRORS},
)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation. Chat mode and greedy decoding are the defaults."""
    context = context_of(request)
    metadata = trace_metadata(request)
    if body.stream:
        return await open_event_stream(
            request,
            _stream(context, body, metadata),
            keep_alive_seconds=context.settings.keep_alive_seconds,
            format_error=error_event,
        )
    return json_response(await run_until_disconnect(request, _complete(context, body, metadata)))


async def _complete(context: ProxyContext, body: ChatCompletionRequest, metadata: Metadata) -> dict[str, Any]:
    return await complete_chat(context, await prepare_chat(context, body, metadata=metadata))


async def _stream(
    context: ProxyContext, body: ChatCompletionRequest, metadata: Metadata
) -> AsyncGenerator[bytes, None]:
    chunks = chat_chunks(context, await prepare_chat(context, body, metadata=metadata))
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        await chunks.aclose()

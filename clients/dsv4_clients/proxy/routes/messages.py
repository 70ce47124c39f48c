"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsv4_clients.proxy.anthropic_answer import complete_message, message_error_event, message_events
from dsv4_clients.proxy.anthropic_request import to_chat_request
from dsv4_clients.proxy.chat_completion import encode_only, prepare_chat
from dsv4_clients.proxy.context import ProxyContext, context_of, trace_metadata
from dsv4_clients.proxy.disconnect import run_until_disconnect
from dsv4_clients.proxy.event_stream import open_event_stream
from dsv4_clients.proxy.http_json import GENERATION_ERRORS, json_response, with_event_stream, with_model
from dsv4_clients.proxy.schemas.chat import ChatCompletionRequest
from dsv4_clients.proxy.schemas.messages import (
    AnthropicErrorResponse,
    CountTokensRequest,
    Message,
    MessagesRequest,
    TokenCount,
)

router = APIRouter(tags=["messages"])
Metadata = tuple[tuple[str, str], ...]
_ERRORS = with_model(GENERATION_ERRORS, AnthropicErrorResponse)


@router.post(
    "/v1/messages",
    response_class=Response,
    responses={200: with_event_stream(Message, "events from `message_start` to `message_stop`"), **_ERRORS},
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation in Anthropic's format, with thinking and tools."""
    context = context_of(request)
    metadata = trace_metadata(request)
    chat = to_chat_request(body)
    if body.stream:
        return await open_event_stream(
            request,
            _stream(context, chat, metadata),
            keep_alive_seconds=context.settings.keep_alive_seconds,
            format_error=message_error_event,
        )
    return json_response(await run_until_disconnect(request, _complete(context, chat, metadata)))


@router.post("/v1/messages/count_tokens", response_class=Response, responses={200: {"model": TokenCount}, **_ERRORS})
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Number of prompt tokens of a messages request."""
    context = context_of(request)
    encoding = encode_only(context, to_chat_request(body), metadata=trace_metadata(request))
    encoded = await run_until_disconnect(request, encoding)
    return json_response({"input_tokens": len(encoded.input_ids)})


async def _complete(context: ProxyContext, chat: ChatCompletionRequest, metadata: Metadata) -> dict[str, Any]:
    return await complete_message(context, await prepare_chat(context, chat, metadata=metadata, id_prefix="msg"))


async def _stream(
    context: ProxyContext, chat: ChatCompletionRequest, metadata: Metadata
) -> AsyncGenerator[bytes, None]:
    events = message_events(context, await prepare_chat(context, chat, metadata=metadata, id_prefix="msg"))
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()

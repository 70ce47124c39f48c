"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsv4_clients.proxy.chat_completion import ChatRun, prepare_chat
from dsv4_clients.proxy.context import ProxyContext, context_of, trace_metadata
from dsv4_clients.proxy.disconnect import run_until_disconnect
from dsv4_clients.proxy.event_stream import open_event_stream
from dsv4_clients.proxy.http_json import GENERATION_ERRORS, json_response, with_event_stream
from dsv4_clients.proxy.responses_answer import complete_response, response_error_event, response_events
from dsv4_clients.proxy.responses_request import to_chat_request
from dsv4_clients.proxy.schemas.responses import ResponseObject, ResponsesRequest

router = APIRouter(tags=["responses"])
Metadata = tuple[tuple[str, str], ...]


@router.post(
    "/v1/responses",
    response_class=Response,
    responses={
        200: with_event_stream(ResponseObject, "events from `response.created` to `response.completed`"),
        **GENERATION_ERRORS,
    },
)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer input items. Nothing is stored; earlier turns are sent again."""
    context = context_of(request)
    metadata = trace_metadata(request)
    if body.stream:
        return await open_event_stream(
            request,
            _stream(context, body, metadata),
            keep_alive_seconds=context.settings.keep_alive_seconds,
            format_error=response_error_event,
        )
    return json_response(await run_until_disconnect(request, _complete(context, body, metadata)))


async def _prepare(context: ProxyContext, body: ResponsesRequest, metadata: Metadata) -> ChatRun:
    return await prepare_chat(context, to_chat_request(body), metadata=metadata, id_prefix="resp")


async def _complete(context: ProxyContext, body: ResponsesRequest, metadata: Metadata) -> dict[str, Any]:
    return await complete_response(context, body, await _prepare(context, body, metadata))


async def _stream(context: ProxyContext, body: ResponsesRequest, metadata: Metadata) -> AsyncGenerator[bytes, None]:
    events = response_events(context, body, await _prepare(context, body, metadata))
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()

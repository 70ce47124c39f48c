"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsv4_clients.proxy.context import context_of, trace_metadata
from dsv4_clients.proxy.disconnect import run_until_disconnect
from dsv4_clients.proxy.event_stream import open_event_stream
from dsv4_clients.proxy.http_json import GENERATION_ERRORS, json_response, with_event_stream
from dsv4_clients.proxy.schemas.completions import Completion, CompletionRequest
from dsv4_clients.proxy.sse import error_event
from dsv4_clients.proxy.text_completion import complete_text, completion_chunks, prepare_completion

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/completions",
    response_class=Response,
    responses={200: with_event_stream(Completion, "`text_completion` events"), **GENERATION_ERRORS},
)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or more prompts, given as text or token ids. Greedy decoding is the default."""
    context = context_of(request)
    run = prepare_completion(context, body, metadata=trace_metadata(request))
    if body.stream:
        return await open_event_stream(
            request,
            completion_chunks(context, run),
            keep_alive_seconds=context.settings.keep_alive_seconds,
            format_error=error_event,
        )
    return json_response(await run_until_disconnect(request, complete_text(context, run)))

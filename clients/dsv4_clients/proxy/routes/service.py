"""Models, health and version."""

from __future__ import annotations

from dsv4 import __version__
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import PlainTextResponse, Response

from dsv4_clients.proxy.context import context_of
from dsv4_clients.proxy.errors import ApiError
from dsv4_clients.proxy.http_json import error_documentation, json_response
from dsv4_clients.proxy.schemas.models import HealthReport, ModelCard, ModelList, ProfileReport, VersionReport

PROFILE_SECONDS = 30.0

router = APIRouter(tags=["service"])


@router.get("/v1/models", responses={200: {"model": ModelList}, **error_documentation(401)}, response_class=Response)
async def list_models(request: Request) -> Response:
    """The served model names."""
    context = context_of(request)
    return json_response(
        {"object": "list", "data": [_card(request, name) for name in context.settings.served_model_names]}
    )


@router.get(
    "/v1/models/{model:path}",
    responses={200: {"model": ModelCard}, **error_documentation(401, 404)},
    response_class=Response,
)
async def get_model(model: str, request: Request) -> Response:
    """One served model name."""
    return json_response(_card(request, context_of(request).resolve_model(model)))


def _card(request: Request, name: str) -> dict[str, object]:
    context = context_of(request)
    return {
        "id": name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "dsv4-triton",
        "root": context.settings.served_model_names[0],
        "parent": None,
        "max_model_len": context.monitor.last_report.engine.get("max_model_len"),
    }


@router.get("/health", responses={200: {"model": HealthReport}}, response_class=Response)
async def health(request: Request) -> Response:
    """Liveness: 200 as long as the proxy runs. The body tells the engine's state."""
    report = await context_of(request).monitor.probe()
    return json_response({"status": "ok", "ready": report.ready, "engine": report.engine})


@router.get(
    "/health/ready",
    responses={200: {"model": HealthReport}, **error_documentation(503)},
    response_class=Response,
)
async def ready(request: Request) -> Response:
    """Readiness: 200 when the engine takes requests, else 503."""
    report = await context_of(request).monitor.probe()
    if not report.ready:
        reason = report.engine.get("error") or f"the engine is {report.engine.get('state', 'not ready')}"
        raise ApiError(503, str(reason), code="not_ready", headers={"Retry-After": "1"})
    return json_response({"status": "ok", "ready": True, "engine": report.engine})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus metrics of the proxy, of Triton and of the engine."""
    context = context_of(request)
    text = await context.metrics.text(context.settings.triton_metrics, context.http)
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.post(
    "/start_profile",
    responses={200: {"model": ProfileReport}, **error_documentation(400, 401, 500, 503, 504)},
    response_class=Response,
)
async def start_profile(request: Request) -> Response:
    """Start the engine's profiler."""
    return json_response(await context_of(request).client.control("start_profile", timeout_seconds=PROFILE_SECONDS))


@router.post(
    "/stop_profile",
    responses={200: {"model": ProfileReport}, **error_documentation(400, 401, 500, 503, 504)},
    response_class=Response,
)
async def stop_profile(request: Request) -> Response:
    """Stop the engine's profiler and write its trace."""
    return json_response(await context_of(request).client.control("stop_profile", timeout_seconds=PROFILE_SECONDS))


@router.get("/version", responses={200: {"model": VersionReport}}, response_class=Response)
async def version() -> Response:
    """The version of this software."""
    return json_response({"version": __version__})

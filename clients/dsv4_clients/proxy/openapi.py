"""The OpenAPI document: what FastAPI derives from the schemas, corrected where the proxy answers differently."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from dsv4_clients.proxy.middleware.authentication import OPEN_PATHS

_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "One of the server's API keys."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, Anthropic's way."},
}


def install_openapi(app: FastAPI, *, with_keys: bool) -> None:
    """Make `/openapi.json` say what the proxy does; `with_keys` when API keys are needed."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _drop_fastapi_validation_errors(document)
            if with_keys:
                _require_keys(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _drop_fastapi_validation_errors(document: dict[str, Any]) -> None:
    """Violations of a schema are a 400 with OpenAI's error body here, never FastAPI's 422."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    schemas = document.get("components", {}).get("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)


def _require_keys(document: dict[str, Any]) -> None:
    document.setdefault("components", {})["securitySchemes"] = _SECURITY_SCHEMES
    for path, operations in document["paths"].items():
        if path not in OPEN_PATHS:
            for operation in operations.values():
                operation["security"] = [{name: []} for name in _SECURITY_SCHEMES]

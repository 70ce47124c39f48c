"""Small responses: models, health, version."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dsv4_clients.proxy.schemas.common import ResponseModel


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int | None = Field(None, description="Context length, once the engine has told it.")


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


class HealthReport(ResponseModel):
    status: Literal["ok"] = Field(description="The proxy runs and answers.")
    ready: bool = Field(description="The engine takes requests.")
    engine: dict[str, Any] = Field(description="State of the engine, or why it is unknown.")


class ProfileReport(ResponseModel):
    profiling: bool


class VersionReport(ResponseModel):
    version: str

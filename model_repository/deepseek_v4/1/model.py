"""The engine model as Triton sees it; everything else is in the package `dsv4.triton`."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils
from dsv4.triton.models import start_engine_service
from dsv4.triton.tensors import complete_engine_config


class TritonPythonModel:
    """Lifecycle only: load starts the engine process, unload ends it."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        return complete_engine_config(auto_complete_model_config)

    def initialize(self, args: dict[str, str]) -> None:
        self._service = start_engine_service(pb_utils, args)

    def execute(self, requests: list[Any]) -> None:
        self._service.execute(requests)

    def is_ready(self) -> bool:
        return self._service.is_ready()

    def finalize(self) -> None:
        self._service.stop()

"""The chat encoder as Triton sees it; everything else is in the package `dsv4.triton`."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils
from dsv4.triton.models import make_encode_service
from dsv4.triton.tensors import complete_encode_config


class TritonPythonModel:
    """Lifecycle only; the instances share nothing."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        return complete_encode_config(auto_complete_model_config)

    def initialize(self, args: dict[str, str]) -> None:
        self._service = make_encode_service(pb_utils, args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self._service.execute(requests)

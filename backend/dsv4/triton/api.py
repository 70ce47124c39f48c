"""What this package uses of `triton_python_backend_utils`, as types: the module exists only inside Triton's stub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Tensor(Protocol):
    """`pb_utils.Tensor`."""

    def name(self) -> str:
        """Name in the model's configuration."""

    def as_numpy(self) -> np.ndarray:
        """The values; STRING tensors are object arrays of bytes."""


class ResponseSender(Protocol):
    """Where the responses of one request go. Not to be used after the response with the FINAL flag."""

    def send(self, response: Any = ..., flags: int = ...) -> None:
        """Send one response, or none with only the FINAL flag."""

    def is_cancelled(self) -> bool:
        """Whether the client went away or cancelled; one round trip to the server process."""


class Request(Protocol):
    """`pb_utils.InferenceRequest` as `execute` gets it."""

    def request_id(self) -> str:
        """The client's id, empty if it gave none."""

    def inputs(self) -> Sequence[Tensor]:
        """The tensors that the client sent."""

    def parameters(self) -> str:
        """Request parameters: a JSON object of scalars."""

    def timeout(self) -> int:
        """Microseconds; 0 means none."""

    def get_response_sender(self) -> ResponseSender:
        """The sender of a decoupled request."""


class BackendUtils(Protocol):
    """The module `triton_python_backend_utils`."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL: int
    Tensor: Any
    InferenceResponse: Any
    TritonError: Any
    MetricFamily: Any


class AutoCompleteConfig(Protocol):
    """`pb_utils.ModelConfig`, which `auto_complete_config` fills."""

    def as_dict(self) -> dict[str, Any]:
        """The configuration so far."""

    def add_input(self, tensor: dict[str, Any]) -> None:
        """Declare an input; a conflict with config.pbtxt raises ValueError."""

    def add_output(self, tensor: dict[str, Any]) -> None:
        """Declare an output; a conflict with config.pbtxt raises ValueError."""

    def set_max_batch_size(self, size: int) -> None:
        """0 means that the batch dimension is not part of the shapes."""

    def set_model_transaction_policy(self, policy: dict[str, Any]) -> None:
        """`{"decoupled": True}` lets a request have any number of responses."""

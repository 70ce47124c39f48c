"""tritonclient's gRPC streaming as the tests use it: one stream a request, outputs by name."""

from __future__ import annotations

import queue
import time
from types import TracebackType
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

_TYPES = {bool: "BOOL", str: "BYTES", list: "INT32"}


def tensor(name: str, value: bool | str | list[int]) -> InferInput:
    """An input tensor of the contract: strings and flags have one element, ids any number."""
    if isinstance(value, list):
        array = np.array(value, dtype=np.int32)
    elif isinstance(value, bool):
        array = np.array([value])
    else:
        array = np.array([value.encode()], dtype=np.object_)
    made = InferInput(name, list(array.shape), _TYPES[type(value)])
    made.set_data_from_numpy(array)
    return made


class GrpcStream:
    """One request on a stream of its own."""

    def __init__(
        self,
        address: str,
        model: str,
        *,
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        timeout_microseconds: int | None = None,
        **inputs: bool | str | list[int],
    ) -> None:
        self._answers: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self._ended = False
        self._client = InferenceServerClient(address)
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))
        self._client.async_stream_infer(
            model,
            [tensor(name, value) for name, value in inputs.items()],
            request_id=request_id,
            parameters=parameters,
            timeout=timeout_microseconds,
            enable_empty_final_response=True,
        )

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def next(self, timeout: float = 60.0) -> tuple[dict[str, Any], bool]:
        """Outputs of the next response, and whether it is the final one. Raises InferenceServerException."""
        result, error = self._answers.get(timeout=timeout)
        if error is not None:
            self._ended = True
            raise error
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        self._ended = response.parameters["triton_final_response"].bool_param
        return outputs, self._ended

    def read(self, timeout: float = 60.0) -> list[dict[str, Any]]:
        """The outputs of all responses up to the final one."""
        deadline = time.monotonic() + timeout
        responses = []
        while True:
            outputs, final = self.next(max(0.01, deadline - time.monotonic()))
            responses.append(outputs)
            if final:
                return responses

    def cancel(self) -> None:
        """Close the stream; a running request is cancelled.

        Cancelling a request that has just ended makes Triton 24.10 lose it now and then, and the model is then not
        unloaded before the exit timeout.
        """
        self._client.stop_stream(cancel_requests=not self._ended)
        self._client.close()


def text_of(responses: list[dict[str, Any]]) -> str:
    """Concatenated text of responses."""
    return "".join(outputs["text_output"][0].decode() for outputs in responses)


def token_ids_of(responses: list[dict[str, Any]]) -> list[int]:
    """Concatenated token ids of responses."""
    return [int(token) for outputs in responses for token in outputs["token_ids"]]

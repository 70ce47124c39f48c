"""The encode model: an OpenAI chat request becomes prompt ids, sampling parameters and the output format."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

from dsv4.chat import ChatTokenizer, encode_request
from dsv4.errors import ErrorCode, RequestError, invalid_argument
from dsv4.triton.api import BackendUtils, Request
from dsv4.triton.request import KNOWN_PARAMETERS, read_parameters, read_text
from dsv4.triton.responses import string_tensor, triton_error

_logger = logging.getLogger(__name__)


class EncodeService:
    """Stateless but for the tokenizer; every instance of the model has its own."""

    def __init__(
        self, api: BackendUtils, tokenizer: ChatTokenizer, *, revision: str, max_model_len: int | None
    ) -> None:
        self._api = api
        self._tokenizer = tokenizer
        self._revision = revision
        self._max_model_len = max_model_len

    def execute(self, requests: Iterable[Request]) -> list[Any]:
        """One response a request, in order; a bad request gets a coded error and does not touch the others."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Request) -> Any:
        try:
            return self._encode(request)
        except RequestError as error:
            failure = error
        except Exception:
            _logger.exception("a chat request could not be encoded")
            failure = RequestError(ErrorCode.INTERNAL, "encoding the request failed; the server's log has the reason")
        return self._api.InferenceResponse(error=triton_error(self._api, failure))

    def _encode(self, request: Request) -> Any:
        # In the ensemble, parameters of the engine step come along.
        read_parameters(request, KNOWN_PARAMETERS)
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if "chat_request" not in inputs:
            raise invalid_argument("chat_request", "is missing; it holds the JSON body of a chat completion request")
        encoded = encode_request(
            read_text("chat_request", inputs["chat_request"]),
            tokenizer=self._tokenizer,
            revision=self._revision,
            max_model_len=self._max_model_len,
        )
        return self._api.InferenceResponse(
            output_tensors=[
                self._api.Tensor("input_ids", np.asarray(encoded.input_ids, dtype=np.int32)),
                string_tensor(self._api, "sampling_parameters", json.dumps(encoded.sampling_parameters)),
                string_tensor(self._api, "output_format", json.dumps(encoded.output_format, ensure_ascii=False)),
            ]
        )

"""The encode model: chat requests become tensors, mistakes coded errors that leave the batch alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from dsv4.triton.encode import EncodeService

from tests.unit.chat.small_vocabulary import small_tokenizer
from tests.unit.triton.fakes import FakeRequest, FakeTritonError, FakeUtils

USER = {"role": "user", "content": "the weather in Paris"}


@pytest.fixture(scope="module")
def service() -> EncodeService:
    return EncodeService(FakeUtils(), small_tokenizer(), revision="preview", max_model_len=64)


def chat(**body: Any) -> FakeRequest:
    return FakeRequest(chat_request=json.dumps(body))


def test_outputs_are_what_the_engine_model_reads(service: EncodeService) -> None:
    [response] = service.execute([chat(messages=[USER], max_tokens=5)])
    assert response.error is None
    assert response.tensors["input_ids"].dtype == np.int32
    assert response.tensors["input_ids"].size > 3
    assert json.loads(response.text("sampling_parameters"))["max_tokens"] == 5
    assert json.loads(response.text("output_format"))["type"] == "chat"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (FakeRequest(), "chat_request"),
        (FakeRequest(parameters={"chat_requests": "{}"}), "chat_requests"),
        (FakeRequest(chat_request="["), "chat_request"),
        (FakeRequest(chat_request=b"\xff"), "chat_request"),
        (FakeRequest(chat_request="[]"), "chat_request"),
        (chat(messages=[]), "messages"),
        (chat(messages=[USER], temperature="hot"), "temperature"),
        (chat(messages=[{"role": "user", "content": "weather " * 200}]), "messages"),
    ],
)
def test_refusals_name_the_field(service: EncodeService, request_: FakeRequest, field: str) -> None:
    bad, good = service.execute([request_, chat(messages=[USER])])
    assert bad.error is not None
    assert bad.error.text.startswith(f"[INVALID_ARGUMENT] {field}: ")
    assert bad.error.triton_code == FakeTritonError.INVALID_ARG
    assert good.error is None


def test_an_unexpected_failure_says_nothing_private() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise OSError("/secret/path")

    service = EncodeService(FakeUtils(), Broken(), revision="preview", max_model_len=64)  # type: ignore[arg-type]
    [response] = service.execute([chat(messages=[USER])])
    assert response.error.text == "[INTERNAL] encoding the request failed; the server's log has the reason"

"""Greedy tokens do not depend on MTP, on company in the batch, on streaming, or on the entry."""

from __future__ import annotations

import concurrent.futures
import json

import pytest

from tests.integration.grpc_client import GrpcStream, token_ids_of
from tests.integration.server import Server, running_server

PROMPTS = ["Huawei is", "What is 1+1?", "The scheduler"]
SAMPLING = json.dumps({"max_tokens": 32, "ignore_eos": True})
CHAT = json.dumps({"messages": [{"role": "user", "content": "What is 1+1?"}], "max_tokens": 24})


def tokens(server: Server, prompt: str, *, stream: bool = True) -> list[int]:
    with GrpcStream(
        server.grpc,
        "deepseek_v4",
        text_input=prompt,
        stream=stream,
        sampling_parameters=SAMPLING,
        return_token_ids=True,
    ) as request:
        return token_ids_of(request.read())


def chat_tokens(server: Server) -> list[int]:
    with GrpcStream(server.grpc, "deepseek_v4_chat", chat_request=CHAT, stream=True, return_token_ids=True) as request:
        return token_ids_of(request.read())


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[str, list[int]]:
    """Tokens of each prompt alone, with the session server's K=1; `chat` through the ensemble."""
    return {**{prompt: tokens(server, prompt) for prompt in PROMPTS}, "chat": chat_tokens(server)}


def test_streamed_or_not(server: Server, expected: dict[str, list[int]]) -> None:
    for prompt in PROMPTS:
        assert tokens(server, prompt, stream=False) == expected[prompt]


def test_among_sixteen(server: Server, expected: dict[str, list[int]]) -> None:
    prompts = (PROMPTS * 6)[:16]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda prompt: tokens(server, prompt), prompts)) == [expected[each] for each in prompts]


@pytest.mark.parametrize("drafts", [0, 3], ids=["without MTP", "K=3"])
def test_with_other_speculation(drafts: int, expected: dict[str, list[int]]) -> None:
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": drafts})
    with running_server("--speculative-config", speculation) as other:
        for prompt in PROMPTS:
            assert tokens(other, prompt) == expected[prompt]
        assert chat_tokens(other) == expected["chat"]

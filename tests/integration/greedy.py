"""Greedy generations whose tokens the tests compare between servers."""

from __future__ import annotations

import json

from tests.integration.grpc_client import GrpcStream, token_ids_of
from tests.integration.server import Server

PROMPTS = ["Huawei is", "What is 1+1?", "The scheduler"]
_SAMPLING = json.dumps({"max_tokens": 32, "ignore_eos": True})
_CHAT = json.dumps({"messages": [{"role": "user", "content": "What is 1+1?"}], "max_tokens": 24})


def tokens(server: Server, prompt: str, *, stream: bool = True) -> list[int]:
    """32 tokens after a raw prompt, through the engine model."""
    with GrpcStream(
        server.grpc,
        "deepseek_v4",
        text_input=prompt,
        stream=stream,
        sampling_parameters=_SAMPLING,
        return_token_ids=True,
    ) as request:
        return token_ids_of(request.read())


def chat_tokens(server: Server) -> list[int]:
    """The answer to a chat request, through the ensemble."""
    with GrpcStream(server.grpc, "deepseek_v4_chat", chat_request=_CHAT, stream=True, return_token_ids=True) as request:
        return token_ids_of(request.read())


def all_tokens(server: Server) -> dict[str, list[int]]:
    """Tokens of every prompt, one after the other, and of the chat."""
    return {**{prompt: tokens(server, prompt) for prompt in PROMPTS}, "chat": chat_tokens(server)}

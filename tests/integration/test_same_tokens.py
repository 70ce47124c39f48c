"""Greedy tokens do not depend on streaming or on company in the batch; test_serve.py compares numbers of drafts."""

from __future__ import annotations

import concurrent.futures

from tests.integration.greedy import PROMPTS, chat_tokens, tokens
from tests.integration.server import Server


def test_streamed_or_not(server: Server, greedy_tokens: dict[str, list[int]]) -> None:
    for prompt in PROMPTS:
        assert tokens(server, prompt, stream=False) == greedy_tokens[prompt]


def test_among_sixteen(server: Server, greedy_tokens: dict[str, list[int]]) -> None:
    prompts = (PROMPTS * 6)[:15]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        chat = pool.submit(chat_tokens, server)
        texts = list(pool.map(lambda prompt: tokens(server, prompt), prompts))
        assert texts == [greedy_tokens[prompt] for prompt in prompts]
        assert chat.result() == greedy_tokens["chat"]

"""Several streams at once; one is given up, which frees its place in the server at once."""

import asyncio
import os

from openai import AsyncOpenAI

QUESTIONS = ["What is 1+1?", "What is Triton?", "What is MTP?", "What is a tensor?"]


async def ask(client: AsyncOpenAI, model: str, question: str, limit: int | None) -> str:
    """The answer, or its first `limit` pieces."""
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=64, stream=True
    )
    pieces: list[str] = []
    async with stream:
        async for chunk in stream:
            pieces.append(chunk.choices[0].delta.content or "")
            if limit is not None and len(pieces) >= limit:
                break  # leaving the block closes the connection, and the server cancels the request
    return "".join(pieces)


async def main() -> None:
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8225/v1")
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = (await client.models.list()).data[0].id
        limits = [None] * (len(QUESTIONS) - 1) + [3]
        answers = await asyncio.gather(*(ask(client, model, *each) for each in zip(QUESTIONS, limits, strict=True)))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question} -> {answer}")


asyncio.run(main())

"""Ending tasks reliably. `asyncio.wait_for` is not used: before Python 3.12 it can swallow a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`. Raises asyncio.TimeoutError, after cancelling it, when it takes longer."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        await cancel_and_wait(task)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks that still run and wait until all have ended; their outcome is dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

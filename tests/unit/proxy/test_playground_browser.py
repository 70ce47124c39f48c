"""The page in a real browser, where playwright and Chromium are installed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.unit.proxy.conftest import StartProxy, until
from tests.unit.proxy.test_disconnect import endless
from tests.unit.proxy.triton_double import EngineRequest, Reply, TritonDouble, usage

async_api = pytest.importorskip("playwright.async_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"a": 1}'}}


@pytest.fixture
async def page(start_proxy: StartProxy) -> AsyncIterator[Any]:
    client = await start_proxy()
    async with async_api.async_playwright() as playwright:
        arguments = ["--no-sandbox", "--no-proxy-server"]
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = await browser.new_page(locale="en-US")
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        await page.goto(str(client.base_url))
        yield page
        await browser.close()
        assert problems == []


async def test_conversation(page: Any, triton: TritonDouble) -> None:
    markup = "<b>not</b> **markup**\n```python\nprint(1)\n```\n"
    triton.script = lambda _: [
        Reply("", {"reasoning_content": "Hmm."}),
        Reply("", {"content": markup}),
        Reply("", finish_reason="stop", usage=usage(5, 9, draft_tokens=4, accepted_draft_tokens=3)),
    ]
    await page.get_by_label("Temperature").fill("0.5")
    await page.get_by_label("Thinking").select_option("high")
    await page.get_by_label("System prompt").fill("Be kind.")
    await page.get_by_label("Question", exact=True).fill("Hi")
    await page.keyboard.press("Enter")
    answer = page.locator("article.assistant")
    await answer.locator(".figures").wait_for()
    assert "<b>not</b>" in await answer.inner_text()
    assert (await answer.locator("pre").inner_text()).strip() == "print(1)"
    assert "75 % of drafts accepted" in await answer.locator(".figures").inner_text()
    assert await answer.locator("details").get_attribute("open") is None, "the thinking folds when the answer begins"
    assert await page.get_by_role("status").nth(1).inner_text() == "The answer is complete."
    (request,) = triton.encoded
    assert [message["content"] for message in request["messages"]] == ["Be kind.", "Hi"]
    assert (request["temperature"], request["reasoning_effort"]) == (0.5, "high")
    await page.get_by_label("Question", exact=True).fill("Again")
    await page.get_by_role("button", name="Send").click()
    await until(lambda: len(triton.encoded) == 2)
    assert triton.encoded[1]["messages"][2]["content"] == markup


async def test_tool_results_go_back(page: Any, triton: TritonDouble) -> None:
    def script(request: EngineRequest) -> list[Reply]:
        if len(triton.encoded) == 1:
            return [Reply("", {"tool_calls": [CALL]}), Reply("", finish_reason="tool_calls", usage=usage(1, 1))]
        return [Reply("", {"content": "Sunny."}, "stop", usage(1, 1))]

    triton.script = script
    await page.get_by_label("Question", exact=True).fill("Weather?")
    await page.keyboard.press("Enter")
    await page.get_by_label("Result of get_weather").fill("sun")
    await page.keyboard.press("Enter")
    await page.get_by_text("Sunny.").wait_for()
    messages = triton.encoded[1]["messages"]
    assert messages[1]["tool_calls"][0] == {key: value for key, value in CALL.items() if key != "index"}
    assert messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "sun"}


@pytest.mark.parametrize("by", ["button", "key"])
async def test_stop_cancels(page: Any, triton: TritonDouble, by: str) -> None:
    triton.script = endless
    await page.get_by_label("Question", exact=True).fill("Go on")
    await page.keyboard.press("Enter")
    await until(lambda: bool(triton.requests) and triton.requests[0].sent > 3)
    if by == "button":
        await page.get_by_role("button", name="Stop").click()
    else:
        await page.keyboard.press("Escape")
    await until(lambda: triton.requests[0].cancelled_at is not None)
    await page.locator(".error", has_text="stopped").wait_for()


async def test_language_and_charts(page: Any, triton: TritonDouble) -> None:
    await page.get_by_label("Language").select_option("zh")
    assert await page.get_by_role("button", name="发送").is_visible()
    assert await page.locator("html").get_attribute("lang") == "zh-CN"
    await page.evaluate("drawMetrics('dsv4_kv_cache_usage_ratio{model=\"m\"} 0.25\\ndsv4_requests_running 3\\n')")
    assert await page.locator("#cache-value").inner_text() == "25.0 %"
    assert await page.locator("#running").get_attribute("aria-label") == "3"
    counters = 'dsv4_mtp_draft_tokens_total{{position="1"}} {}\\ndsv4_mtp_accepted_tokens_total {}\\n'
    for drafted, accepted in ((10, 8), (20, 14)):
        await page.evaluate(f"drawMetrics('{counters.format(drafted, accepted)}')")
    assert await page.locator("#acceptance-value").inner_text() == "60 %"


async def test_everything_is_reached_by_keyboard(page: Any) -> None:
    reached = set()
    await page.get_by_label("Language").focus()
    for _ in range(20):
        reached.add(await page.evaluate("document.activeElement.id"))
        await page.keyboard.press("Tab")
    assert {"language", "question", "send", "clear", "effort", "system", "temperature", "tools", "key"} <= reached
    await asyncio.sleep(0)

"""Takes the documentation's pictures of the playground from a running server.

`python -m tests.tools.playground_screenshots http://127.0.0.1:8225 docs/images`; needs playwright and Chromium.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

QUESTIONS = ("What is MTP?", "What is 7 + 5?")
PICTURES = (("light", "en-US"), ("dark", "zh-CN"))


def take(browser: Browser, url: str, scheme: str, locale: str, path: Path) -> None:
    """Ask the questions with thinking on, unfold the last thinking, and save a picture."""
    page = browser.new_page(color_scheme=scheme, locale=locale, viewport={"width": 1180, "height": 900})  # type: ignore[arg-type]
    page.goto(url)
    page.locator("#effort").select_option("high")
    for index, question in enumerate(QUESTIONS):
        page.locator("#question").fill(question)
        page.keyboard.press("Enter")
        page.locator("article.assistant").nth(index).locator(".figures").wait_for(timeout=120_000)
        page.wait_for_timeout(4_500)  # the charts take a sample every two seconds
    page.locator("details summary").last.click()
    page.screenshot(path=path)
    page.close()


def main(url: str, directory: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--no-proxy-server"]
        )
        for scheme, locale in PICTURES:
            take(browser, url, scheme, locale, Path(directory) / f"playground-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

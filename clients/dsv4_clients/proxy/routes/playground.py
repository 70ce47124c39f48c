"""GET /: the playground."""

from __future__ import annotations

from functools import cache

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from dsv4_clients.proxy.playground import Page, load_page

router = APIRouter(tags=["service"])


@cache
def _page() -> Page:
    return load_page()


@router.get("/", response_class=HTMLResponse)
async def playground() -> Response:
    """A page to chat with the model."""
    page = _page()
    return HTMLResponse(
        page.html,
        headers={
            "Content-Security-Policy": page.content_security_policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        },
    )

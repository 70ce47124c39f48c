"""The chat page at `/`: one document with its style and script inside, no build step, no other host."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Page:
    """The document and the content security policy that lets only its own style and script run."""

    html: str
    content_security_policy: str


def load_page() -> Page:
    """Put the page together from its files."""
    directory = files(__name__)
    html, style, script = (
        directory.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "style.css", "script.js")
    )
    policy = "; ".join(
        (
            "default-src 'none'",
            "connect-src 'self'",
            f"style-src '{_digest(style)}'",
            f"script-src '{_digest(script)}'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Page(html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script), policy)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")

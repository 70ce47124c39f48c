"""The state of a terminal chat: messages, settings, and the request they make."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4.errors import Dsv4Error

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class CommandError(Dsv4Error):
    """A command of the user cannot be carried out."""


@dataclass
class Conversation:
    """`effort` None means chat mode. `settings` are further request fields, such as temperature."""

    model: str | None = None
    system: str | None = None
    effort: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def request(self) -> dict[str, Any]:
        """The body of the next chat completion."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            **self.settings,
            "messages": [*system, *self.messages],
            "stream_options": {"include_usage": True},
        }
        if self.model is not None:
            body["model"] = self.model
        if self.effort is not None:
            body["reasoning_effort"] = self.effort
        return body

    def ask(self, text: str) -> None:
        """Add what the user says."""
        self.messages.append({"role": "user", "content": text})

    def answer(self, message: dict[str, Any]) -> None:
        """Add what the model said; its reasoning stays in the history, because tool turns need it."""
        self.messages.append(message)

    def drop_last_turn(self) -> str | None:
        """Forget the last question and everything after it; gives the question."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                question = str(self.messages[index]["content"])
                del self.messages[index:]
                return question
        return None

    def set_thinking(self, value: str) -> None:
        """`on`, `off` or an effort. Raises CommandError."""
        if value in ("off", "none"):
            self.effort = None
        elif value == "on":
            self.effort = "high"
        elif value in EFFORTS:
            self.effort = value
        else:
            raise CommandError(f"thinking: use on, off or one of {', '.join(EFFORTS)}")

    def set_field(self, name: str, text: str) -> None:
        """Set a request field to a JSON value (or to the text, if it is none); an empty text removes it."""
        if not text:
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = json.loads(text)
        except ValueError:
            self.settings[name] = text

    def set_tools(self, path: Path | None) -> None:
        """Offer the function tools of a JSON file, or none. Raises CommandError."""
        if path is None:
            self.settings.pop("tools", None)
            return
        try:
            self.settings["tools"] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CommandError(f"tools: {error}") from None

    def save(self, path: Path) -> None:
        """Write the conversation as a request body. Raises CommandError."""
        try:
            text = json.dumps(self.request(), ensure_ascii=False, indent=2)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise CommandError(f"save: {error}") from None

    def load(self, path: Path) -> None:
        """Continue a saved conversation. Raises CommandError."""
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            messages = list(body.pop("messages"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommandError(f"load: {error}") from None
        body.pop("stream_options", None)
        self.effort = body.pop("reasoning_effort", None)
        self.model = body.pop("model", self.model)
        self.system = messages.pop(0)["content"] if messages and messages[0].get("role") == "system" else None
        self.messages, self.settings = messages, body

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dsv4.chat import ChatTokenizer

from tests.tools.replay_vectors import default_tokenizer

DATA = Path(__file__).parents[2] / "data" / "chat"


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    """The official tokenizer."""
    return default_tokenizer()


@pytest.fixture(scope="session")
def literals() -> dict[str, Any]:
    return json.loads((DATA / "chat-literals.json").read_text(encoding="utf-8"))


@pytest.fixture
def weather_tool() -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather for a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }

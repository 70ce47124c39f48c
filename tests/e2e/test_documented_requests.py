"""The requests of the documentation, run as they are printed, and the example clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.server import Server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "clients"

CHAT = """curl --noproxy "*" http://127.0.0.1:8225/v1/chat/completions \\
-H "Content-Type: application/json" \\
-d '{"messages":[{"role":"user","content":"What is 1+1?"}],"max_tokens":32}'"""
THINKING = """curl --noproxy "*" http://127.0.0.1:8225/v1/chat/completions \\
-H "Content-Type: application/json" \\
-d '{"messages":[{"role":"user","content":"What is 1+1?"}],"max_tokens":128,\
"chat_template_kwargs":{"enable_thinking":true}}'"""
HEALTH = """curl --noproxy "*" http://127.0.0.1:8225/health"""
COMPLETION = """curl --noproxy "*" http://127.0.0.1:8225/v1/completions \\
-H "Content-Type: application/json" \\
-d '{"prompt":"Huawei is","max_tokens":20,"temperature":0}'"""


def run(command: str, server: Server) -> dict[str, object]:
    command = command.replace("127.0.0.1:8225", f"127.0.0.1:{server.port}")
    finished = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    answer: dict[str, object] = json.loads(finished.stdout)
    return answer


def test_health(server: Server) -> None:
    answer = run(HEALTH, server)
    assert (answer["status"], answer["ready"]) == ("ok", True)


def test_chat_and_thinking(server: Server) -> None:
    message = run(CHAT, server)["choices"][0]["message"]  # type: ignore[index]
    assert "2" in message["content"]
    assert "reasoning_content" not in message
    message = run(THINKING, server)["choices"][0]["message"]  # type: ignore[index]
    assert message["reasoning_content"]
    assert "2" in message["content"]


def test_completion_is_deterministic(server: Server) -> None:
    first, second = (run(COMPLETION, server)["choices"] for _ in range(2))
    assert first == second
    assert first[0]["text"]  # type: ignore[index]


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")))
def test_example_clients(server: Server, name: str) -> None:
    command = [sys.executable] if name.endswith(".py") else ["bash"]
    addresses = {"OPENAI_BASE_URL": f"{server.api}/v1", "TRITON_GRPC": server.grpc, "TRITON_HTTP": server.http}
    finished = subprocess.run(
        [*command, str(EXAMPLES / name)],
        env={**os.environ, **addresses, "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip()

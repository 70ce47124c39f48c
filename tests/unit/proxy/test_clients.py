"""The terminal chat and the load generator against the whole proxy."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from dsv4.cli.main import build_app
from dsv4.errors import ConfigurationError
from dsv4_clients.bench.report import latency_picture
from dsv4_clients.bench.runner import RequestRecord, run_workload
from dsv4_clients.bench.summary import Goal, distribution, summarize
from dsv4_clients.bench.workload import Workload
from dsv4_clients.chat.conversation import CommandError, Conversation
from dsv4_clients.chat.terminal import TerminalChat
from dsv4_clients.openai_stream import ServerError, make_client, stream_events
from rich.console import Console
from typer.testing import CliRunner

from tests.unit.proxy.conftest import StartProxy, until
from tests.unit.proxy.test_disconnect import CHAT, endless
from tests.unit.proxy.triton_double import Failure, Reply, TritonDouble, usage


async def chat(client: httpx.AsyncClient, lines: Sequence[str], conversation: Conversation) -> str:
    """Output of a terminal chat in which the user types `lines`."""
    typed: Iterator[str] = iter(lines)

    def read_line(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    output = io.StringIO()
    console = Console(file=output, width=200)
    async with make_client(f"{client.base_url}/v1", None) as openai:
        await TerminalChat(openai, conversation, console, read_line).run()
    return output.getvalue()


async def test_terminal_chat_keeps_the_conversation(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    conversation = Conversation()
    lines = ["/system Be brief", "Hi", '"""', "two", "lines", '"""', "more\\", "of it", "/set seed 3", "/thinking max"]
    output = await chat(client, [*lines, "last", "/exit", "never sent"], conversation)
    assert output.count("Hello world") == 4
    assert "3 tokens" in output
    last = triton.encoded[-1]
    assert [message["content"] for message in last["messages"]] == [
        *("Be brief", "Hi", "Hello world", "two\nlines", "Hello world", "more\nof it", "Hello world", "last"),
    ]
    assert (last["seed"], last["reasoning_effort"]) == (3, "max")


async def test_terminal_chat_shows_thinking_and_calls(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    triton.script = lambda _: [
        Reply("", {"reasoning_content": "secret thought"}),
        Reply("", {"content": "Let me look."}),
        Reply("", {"tool_calls": [call]}),
        Reply("", finish_reason="tool_calls", usage=usage(3, 4, draft_tokens=4, accepted_draft_tokens=3)),
    ]
    output = await chat(client, ["Weather?"], Conversation())
    assert output.splitlines()[:3] == ["secret thought", "Let me look.", '→ weather {"city":"Rome"}']
    assert "75% of drafts accepted" in output
    folded = await chat(client, ["/fold", "Weather?"], Conversation())
    assert "secret thought" not in folded
    assert "thinking …" in folded


async def test_terminal_chat_survives_errors(client: httpx.AsyncClient, triton: TritonDouble, tmp_path: Path) -> None:
    conversation = Conversation()
    triton.script = lambda _: [Failure("[QUEUE_FULL] 8 requests wait")]
    lines = ["Hi", "/nonsense", "/thinking sideways", f"/load {tmp_path / 'absent'}", f"/tools {tmp_path}"]
    output = await chat(client, lines, conversation)
    for words in ("8 requests wait", "unknown command /nonsense", "thinking: use on", "load: ", "tools: "):
        assert words in output
    assert conversation.messages == []


def test_conversation_is_saved_and_loaded(tmp_path: Path) -> None:
    conversation = Conversation(system="s", effort="high", settings={"temperature": 0.5})
    conversation.ask("q")
    conversation.answer({"role": "assistant", "content": "a"})
    conversation.save(tmp_path / "chat.json")
    loaded = Conversation()
    loaded.load(tmp_path / "chat.json")
    assert loaded == conversation
    assert loaded.drop_last_turn() == "q"
    assert loaded.messages == []
    with pytest.raises(CommandError):
        loaded.save(tmp_path)


async def test_closing_the_stream_cancels(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = endless
    async with make_client(f"{client.base_url}/v1", None) as openai:
        events = stream_events(openai, "/chat/completions", CHAT)
        await anext(events)
        await events.aclose()
        await until(lambda: triton.requests[0].cancelled_at is not None)


async def test_broken_stream_is_an_error(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = lambda _: [Reply("a", {"content": "a"}), Failure("[ENGINE_DEAD] gone")]
    async with make_client(f"{client.base_url}/v1", None) as openai:
        with pytest.raises(ServerError, match="gone"):
            async for _ in stream_events(openai, "/chat/completions", CHAT):
                pass


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_load_generator_measures(client: httpx.AsyncClient, triton: TritonDouble, endpoint: Any) -> None:
    workload = Workload(base_url=f"{client.base_url}/v1", requests=12, concurrency=4, endpoint=endpoint, input_words=5)
    finished: list[RequestRecord] = []
    records = await run_workload(workload, finished.append)
    assert len(records) == len(finished) == len(triton.requests) == 12
    summary = summarize(records, Goal(first_token_seconds=30))
    assert (summary["succeeded"], summary["errors"]) == (12, {})
    assert summary["output_tokens"] == 36
    assert summary["good_requests_per_second"] == pytest.approx(summary["requests_per_second"])
    assert summary["time_to_first_token_ms"]["p50"] <= summary["request_ms"]["max"]
    sampling = [request.inputs["sampling_parameters"] for request in triton.requests]
    assert all(parameters["max_tokens"] == 64 for parameters in sampling)


async def test_load_generator_reports_failures(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    triton.script = lambda _: [Failure("[QUEUE_FULL] full")]
    workload = Workload(base_url=f"{client.base_url}/v1", requests=3, request_rate=1000.0)
    summary = summarize(await run_workload(workload, lambda record: None), Goal())
    assert (summary["succeeded"], summary["errors"]) == (0, {"full": 3})
    assert summary["good_requests_per_second"] == 0


async def test_concurrency_is_kept(start_proxy: StartProxy, triton: TritonDouble) -> None:
    client = await start_proxy(max_concurrent_requests=2)
    triton.script = lambda _: [Reply("a", {"content": "a"}), Reply("", None, "stop", usage(1, 1), after=0.02)]
    summary = summarize(
        await run_workload(Workload(base_url=f"{client.base_url}/v1", requests=8, concurrency=2), lambda record: None),
        Goal(),
    )
    assert summary["errors"].keys() <= {"2 requests are being answered, which is the limit of this server."}
    assert summary["succeeded"] >= 6, "a slot is freed a moment after the last byte"


def test_summary_arithmetic() -> None:
    records = [
        RequestRecord(0.0, 0.1, 1.1, [0.5, 0.5], 10, 3, 6, 2),
        RequestRecord(1.0, 1.5, 2.0, [0.25, 0.25], 10, 3),
        RequestRecord(1.0, ended=1.2, error="boom"),
    ]
    summary = summarize(records, Goal(first_token_seconds=0.2))
    assert summary["wall_seconds"] == pytest.approx(2.0)
    assert summary["output_tokens_per_second"] == pytest.approx(3.0)
    assert summary["good_requests_per_second"] == pytest.approx(0.5)
    assert summary["draft_acceptance"] == pytest.approx(0.75)
    assert summary["time_per_output_token_ms"]["max"] == pytest.approx(500)
    values = distribution([float(value) for value in range(1, 101)])
    assert values is not None
    assert (values.p50, values.p90, values.p99, values.max) == (50_000, 90_000, 99_000, 100_000)
    picture = ElementTree.fromstring(latency_picture(records, "a < b"))
    assert len(picture.findall("{http://www.w3.org/2000/svg}polyline")) == 2


def test_datasets(tmp_path: Path) -> None:
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    bodies = list(Workload(base_url="", requests=3, dataset=good).bodies())
    assert [body["messages"][0]["content"] for body in bodies] == ["a", "b", "a"]
    for text in ("", "{", '{"other": 1}\n', "[]\n"):
        bad = tmp_path / "bad.jsonl"
        bad.write_text(text)
        with pytest.raises(ConfigurationError, match="--dataset"):
            list(Workload(base_url="", dataset=bad).bodies())


def test_bench_command_writes_its_files(tmp_path: Path) -> None:
    """Without a server every request fails, which the exit status says; the files are written all the same."""
    result_file, picture = tmp_path / "r.json", tmp_path / "r.svg"
    arguments = ["bench", "--base-url", "http://127.0.0.1:1/v1", "--requests", "2"]
    result = CliRunner().invoke(build_app(), [*arguments, "--output", str(result_file), "--picture", str(picture)])
    assert result.exit_code == 1
    written = json.loads(result_file.read_text())
    assert (written["requests"], written["succeeded"]) == (2, 0)
    assert picture.read_text().startswith("<svg")

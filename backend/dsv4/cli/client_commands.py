"""`dsv4 proxy`, `dsv4 chat` and `dsv4 bench`: the HTTP side. The modules behind them load when they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Annotated, Optional

import typer

from dsv4.errors import ConfigurationError

_BASE_URL = typer.Option("--base-url", help="OpenAI-compatible API.", envvar="OPENAI_BASE_URL")
_API_KEY = typer.Option("--api-key", help="Its key.", envvar="OPENAI_API_KEY", show_envvar=True)
_DEFAULT_BASE_URL = "http://127.0.0.1:8225/v1"


def register(app: typer.Typer) -> None:
    """Mount the commands."""
    app.command(
        "proxy",
        help="OpenAI-compatible HTTP API in front of a running tritonserver.",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(run_proxy_command)
    app.command("chat")(run_chat_command)
    app.command("bench")(run_bench_command)


def run_proxy_command(context: typer.Context) -> None:
    """All arguments belong to the proxy's own command line, so that `python -m dsv4_clients.proxy` is the same."""
    from dsv4_clients.proxy.server import run_proxy
    from dsv4_clients.proxy.settings import read_settings

    run_proxy(read_settings(context.args))


def run_chat_command(
    base_url: Annotated[str, _BASE_URL] = _DEFAULT_BASE_URL,
    api_key: Annotated[Optional[str], _API_KEY] = None,  # noqa: UP045 - typer reads this on Python 3.10
    model: Annotated[Optional[str], typer.Option(help="Model name, if the server needs one.")] = None,  # noqa: UP045
    system: Annotated[Optional[str], typer.Option(help="System prompt.")] = None,  # noqa: UP045
    thinking: Annotated[str, typer.Option(help="on, off or an effort.")] = "off",
) -> None:
    """Chat in the terminal with this or any OpenAI-compatible server; /help lists the commands."""
    from dsv4_clients.chat.conversation import Conversation
    from dsv4_clients.chat.terminal import TerminalChat
    from dsv4_clients.openai_stream import make_client
    from rich.console import Console

    conversation = Conversation(model=model, system=system)
    conversation.set_thinking(thinking)

    async def chat() -> None:
        async with make_client(base_url, api_key) as client:
            await TerminalChat(client, conversation, Console(), _read_line).run()

    asyncio.run(chat())


def _read_line(prompt: str) -> str:
    """`input` with line editing and history where the platform has readline."""
    if os.isatty(0):
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - importing it is what gives input() its editing
    return input(prompt)


def run_bench_command(
    base_url: Annotated[str, _BASE_URL] = _DEFAULT_BASE_URL,
    api_key: Annotated[Optional[str], _API_KEY] = None,  # noqa: UP045 - typer reads this on Python 3.10
    model: Annotated[Optional[str], typer.Option(help="Model name, if the server needs one.")] = None,  # noqa: UP045
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once, at most.")] = 8,
    request_rate: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.001, help="Requests a second with Poisson arrivals; otherwise as concurrency allows."),
    ] = None,
    input_words: Annotated[int, typer.Option(min=1, help="Words of a synthetic prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, help="max_tokens of a request.")] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="Always produce output-tokens tokens.")] = True,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    dataset: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="JSON lines with prompt or messages, instead of synthetic prompts."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    goal_first_token_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="A good request has its first token by then."),
    ] = None,
    goal_token_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="A good request takes at most this long per further token."),
    ] = None,
    goal_request_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="A good request takes at most this long."),
    ] = None,
    output: Annotated[Optional[Path], typer.Option(help="Write the result as JSON.")] = None,  # noqa: UP045
    picture: Annotated[Optional[Path], typer.Option(help="Write the latencies as an SVG picture.")] = None,  # noqa: UP045
) -> None:
    """Put load on an OpenAI-compatible server and measure latency and throughput."""
    from dsv4_clients.bench.command import run_bench
    from dsv4_clients.bench.summary import Goal
    from dsv4_clients.bench.workload import PATHS, Workload
    from rich.console import Console

    if endpoint not in PATHS:
        raise ConfigurationError(f"--endpoint: must be one of {', '.join(PATHS)}, not {endpoint!r}")
    if picture is not None and picture.suffix != ".svg":
        raise ConfigurationError(f"--picture: the name must end with .svg, not {picture.suffix!r}")
    workload = Workload(
        base_url=base_url,
        api_key=api_key,
        model=model,
        endpoint=endpoint,
        requests=requests,
        concurrency=concurrency,
        request_rate=request_rate,
        input_words=input_words,
        output_tokens=output_tokens,
        ignore_eos=ignore_eos,
        temperature=temperature,
        dataset=dataset,
        seed=seed,
    )
    goal = Goal(
        first_token_seconds=_seconds(goal_first_token_ms),
        token_seconds=_seconds(goal_token_ms),
        request_seconds=_seconds(goal_request_ms),
    )
    summary = run_bench(workload, goal, console=Console(), output=output, picture=picture)
    if summary["succeeded"] < summary["requests"]:
        raise typer.Exit(1)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000

"""`dsv4 serve`: tritonserver with our models, and the OpenAI-compatible proxy, in one foreground process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from dsv4.cli.engine_options import engine_environment, with_engine_options
from dsv4.config import EngineConfig
from dsv4.default_model import resolve_model
from dsv4.errors import ConfigurationError
from dsv4.triton.installation import TritonInstallation, find_installation, find_model_repository
from dsv4.triton.models import ENGINE_FILE, ENGINE_MODEL
from dsv4.triton.stack import ServingStack, StackSettings, environment_lines

# ruff: noqa: UP045 - typer reads Optional on Python 3.10


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "serve",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": False},
    )(with_engine_options(serve))


def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address of the OpenAI-compatible API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the OpenAI-compatible API.")] = 8225,
    generate_config: Annotated[
        Optional[str], typer.Option(help="JSON object: sampling parameters for requests that name none.")
    ] = None,
    triton_server: Annotated[
        Optional[Path], typer.Option(help="The tritonserver to run; default: that of nvidia-pytriton, or on PATH.")
    ] = None,
    model_repository: Annotated[Optional[Path], typer.Option(help="Another model repository.")] = None,
    triton_address: Annotated[str, typer.Option(help="Address of Triton's own ports.")] = "127.0.0.1",
    triton_http_port: Annotated[int, typer.Option(help="Triton's HTTP port.")] = 8000,
    triton_grpc_port: Annotated[int, typer.Option(help="Triton's gRPC port.")] = 8001,
    triton_metrics_port: Annotated[int, typer.Option(help="Triton's metrics port.")] = 8002,
    exit_timeout_secs: Annotated[
        int, typer.Option(min=0, help="Seconds that running requests get to finish on SIGTERM or SIGINT.")
    ] = 60,
    print_environment: Annotated[
        bool, typer.Option("--print-environment", help="Print shell lines for a plain tritonserver, and end.")
    ] = False,
    *,
    engine_flags: dict[str, Any],
) -> None:
    """Serve a model through Triton and an OpenAI-compatible API until SIGINT or SIGTERM.

    What follows a lone -- goes to the proxy: `dsv4 serve -- --api-key SECRET` (see `dsv4 proxy --help`).
    """
    installation = find_installation(triton_server)
    if print_environment:
        for line in environment_lines(installation):
            typer.echo(line)
        return
    repository = (model_repository or find_model_repository()).resolve()
    environment = engine_environment(engine_flags)
    config = _engine_config(repository, environment)
    settings = StackSettings(
        model_repository=repository,
        host=host,
        port=port,
        triton_address=triton_address,
        triton_http_port=triton_http_port,
        triton_grpc_port=triton_grpc_port,
        triton_metrics_port=triton_metrics_port,
        exit_timeout_seconds=exit_timeout_secs,
        start_timeout_seconds=config.start_timeout_seconds,
        show_startup_logs=config.show_startup_logs,
        engine_environment=environment,
        proxy_options=_proxy_options(config, generate_config, exit_timeout_secs, context.args),
    )
    raise typer.Exit(_run(settings, installation))


def _run(settings: StackSettings, installation: TritonInstallation) -> int:
    def echo(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    return ServingStack(settings, installation, echo).run()


def _engine_config(repository: Path, environment: dict[str, str]) -> EngineConfig:
    """The flags as the engine will see them, so that a mistake is reported before anything starts."""
    file = repository / ENGINE_MODEL / "1" / ENGINE_FILE
    explicit = os.environ.get("DSV4_ENGINE_CONFIG")
    if explicit:
        file = Path(explicit)
    return EngineConfig.build(file=file if file.is_file() else None, environment={**os.environ, **environment})


def _proxy_options(
    config: EngineConfig, generate_config: str | None, exit_timeout: int, further: list[str]
) -> list[str]:
    directory = resolve_model(config.model, progress=lambda text: typer.echo(text, err=True))
    # The name of the Triton model always works too.
    names = dict.fromkeys([config.model_name, ENGINE_MODEL])
    options = ["--served-model-name", *names, "--shutdown-timeout", str(exit_timeout)]
    if (directory / "tokenizer.json").is_file():
        options += ["--tokenizer", str(directory)]
    if generate_config is not None:
        options += ["--generate-config", generate_config]
    unexpected = next((each for each in further if not each.startswith("-")), None)
    if further and further[0] == unexpected:
        raise ConfigurationError(f"unexpected argument {unexpected!r}; options of the proxy follow a lone --")
    return options + further

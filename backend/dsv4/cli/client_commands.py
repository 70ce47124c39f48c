"""`dsv4 proxy`: the HTTP front."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Mount the commands."""
    app.command(
        "proxy",
        help="OpenAI-compatible HTTP API in front of a running tritonserver.",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(run_proxy_command)


def run_proxy_command(context: typer.Context) -> None:
    """All arguments belong to the proxy's own command line, so that `python -m dsv4_clients.proxy` is the same."""
    from dsv4_clients.proxy.server import run_proxy
    from dsv4_clients.proxy.settings import read_settings

    run_proxy(read_settings(context.args))

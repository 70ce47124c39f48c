"""The `dsv4` command: one sub-command a task, errors as one line."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import typer

from dsv4 import __version__
from dsv4.errors import Dsv4Error

COMMAND_MODULES = (
    "dsv4.cli.serve_command",
    "dsv4.cli.generate_command",
    "dsv4.cli.checkpoint_commands",
    "dsv4.cli.score_command",
    "dsv4.cli.client_commands",
    "dsv4.cli.doctor_command",
)


def build_app() -> typer.Typer:
    """The typer application with every sub-command mounted."""
    app = typer.Typer(
        name="dsv4",
        help="Serve DeepSeek V4 Flash from Triton Inference Server.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )

    def show_version(value: bool) -> None:
        if value:
            typer.echo(f"dsv4 {__version__}")
            raise typer.Exit()

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        pass

    for module in COMMAND_MODULES:
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module).register(app)
    return app


def main() -> None:
    """Run the command line; expected errors end with status 1 and one line on standard error."""
    try:
        build_app()()
    except Dsv4Error as error:
        sys.stderr.write(f"dsv4: error: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The engine's flags as command line options, made from `EngineConfig`, so that both cannot drift apart."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Optional

import typer

from dsv4.config.engine_config import ENVIRONMENT_PREFIX, FIELDS, option_name, plain_type

_PANEL = "Engine"


def with_engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command an option for every engine flag; they arrive in its parameter `engine_flags`.

    `engine_flags` is a dict by field name with the flags that the user gave, and only those.
    """
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != "engine_flags"
    ]
    taken = {parameter.name for parameter in own}
    flags = [parameter for parameter in _engine_parameters() if parameter.name not in taken]

    def run(**values: Any) -> Any:
        given = {flag.name: value for flag in flags if (value := values.pop(flag.name)) is not None}
        return command(**values, engine_flags=given)

    parameters = [*own, *flags]
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def engine_environment(flags: Mapping[str, Any]) -> dict[str, str]:
    """The flags as the environment variables that `EngineConfig.build` reads."""
    values = dict(flags)
    drafts = values.pop("num_speculative_tokens", None)
    if drafts is not None and "speculative_config" not in values:
        # The deprecated alias must win over a speculative_config in engine.json, not clash with it.
        values["speculative_config"] = json.dumps({"method": "mtp", "num_speculative_tokens": drafts})
    elif drafts is not None:
        values["num_speculative_tokens"] = drafts
    return {ENVIRONMENT_PREFIX + name.upper(): _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _engine_parameters() -> list[inspect.Parameter]:
    return [_parameter(name) for name in FIELDS]


def _parameter(name: str) -> inspect.Parameter:
    field, kind, flag = FIELDS[name], plain_type(name), option_name(name)
    declaration = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    default = "" if field.default is None else f" [default: {_text(field.default)}]"
    option = typer.Option(
        declaration, help=field.metadata["help"] + default, rich_help_panel=_PANEL, show_default=False
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[kind], option],  # noqa: UP045 - typer reads this on Python 3.10
    )

"""From our flags to a command line for upstream's own parser, by what that parser knows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dsv4.errors import ConfigurationError
from dsv4.pypto.options import ENGINE_FLAGS, PyptoOptions

RING_FLAGS = ("ring_dep_pool", "ring_task_window", "ring_heap")
"""Older upstream versions size the rings by environment variables; see `dsv4.pypto.environment`."""


def upstream_arguments(options: PyptoOptions, parser: argparse.ArgumentParser) -> list[str]:
    """The argument list that configures upstream's engine as our flags say.

    Flags that this version of upstream does not know are left out when something else stands in for them, and are an
    error otherwise. Raises ConfigurationError that names the flag.
    """
    known = {string for action in parser._actions for string in action.option_strings}
    arguments = ["--model", options.model]
    for name, value in _engine_flags(options):
        option = "--" + name.replace("_", "-")
        if value is False and f"--no-{option[2:]}" in known:
            arguments.append(f"--no-{option[2:]}")
        elif value is True and option in known:
            arguments.append(option)
        elif value is False:
            continue
        elif option in known:
            arguments += [option, _text(value)]
        elif name not in RING_FLAGS:
            raise ConfigurationError(f"{option}: the installed pypto_serving does not know this flag")
    return arguments


def knows_flag(parser: argparse.ArgumentParser, option: str) -> bool:
    """Whether a parser accepts an option such as `--ring-heap`."""
    return any(option in action.option_strings for action in parser._actions)


def _engine_flags(options: PyptoOptions) -> Iterator[tuple[str, Any]]:
    for name in ENGINE_FLAGS:
        value = options.flags.get(name)
        if value is not None and name != "enable_prefix_caching":
            yield name, value
    # Upstream's default is on; sharing a prefix can then overfill one rank, so it is on only when asked for.
    yield "enable_prefix_caching", options.prefix_caching


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value, separators=(",", ":"))
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)

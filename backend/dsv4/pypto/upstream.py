"""The installed pypto_serving: found, imported, and asked what it can do. Nothing is inferred from versions."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from dsv4.errors import ConfigurationError, EngineStartError

PACKAGE = "pypto_serving"


@dataclass(frozen=True)
class Upstream:
    """Handles to upstream's objects.

    Attributes:
        prompt_ids_parameter: whether `add_request` takes `prompt_token_ids`; older versions get the ids through a
            tokenizer that passes lists on.
        generate_fields: names of the fields of GenerateConfig.
    """

    parser: argparse.ArgumentParser
    build_config: Callable[[argparse.Namespace], Any]
    engine_class: Any
    generate_config: Any
    worker_module: ModuleType
    prompt_ids_parameter: bool
    generate_fields: frozenset[str]

    @property
    def seeded_sampling(self) -> bool:
        """Whether sampling takes a seed."""
        return "seed" in self.generate_fields


def is_installed() -> bool:
    """Whether the package can be found; it is not imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def build_parser() -> argparse.ArgumentParser:
    """Upstream's own command line. Raises EngineStartError when the package is missing or broken."""
    return _attribute("pypto_serving.cli.main", "build_parser")()


def load_upstream() -> Upstream:
    """Import what the adapter uses. Raises EngineStartError that names what is missing."""
    engine_class = _attribute("pypto_serving.serving.engine.async_engine", "AsyncLLMEngine")
    generate_config = _attribute("pypto_serving.config.types", "GenerateConfig")
    return Upstream(
        parser=build_parser(),
        build_config=_attribute("pypto_serving.cli.main", "build_serving_engine_config"),
        engine_class=engine_class,
        generate_config=generate_config,
        worker_module=_module("pypto_serving.serving.server.serving_worker"),
        prompt_ids_parameter="prompt_token_ids" in inspect.signature(engine_class.add_request).parameters,
        generate_fields=frozenset(field.name for field in dataclasses.fields(generate_config)),
    )


def parse_configuration(upstream: Upstream, arguments: list[str]) -> Any:
    """Upstream's EngineConfig for an argument list. Raises ConfigurationError with upstream's own reason."""
    upstream.parser.error = _refuse_flags  # type: ignore[method-assign]
    namespace = upstream.parser.parse_args(arguments)
    try:
        return upstream.build_config(namespace)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    except (ImportError, OSError) as error:
        raise EngineStartError(f"pypto_serving cannot be configured: {error}") from None


def _refuse_flags(message: str) -> NoReturn:
    """Instead of printing the usage and ending the process."""
    raise ConfigurationError(message)


def _module(name: str) -> ModuleType:
    if not is_installed():
        raise EngineStartError(
            "pypto_serving is not installed: put a checkout on PYTHONPATH, or use an image that carries it"
        )
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EngineStartError(f"{name} cannot be imported: {error}") from None


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(_module(module), name)
    except AttributeError:
        raise EngineStartError(f"{module} has no {name}: this version of pypto_serving is not supported") from None

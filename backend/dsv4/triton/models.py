"""From the arguments that Triton gives a Python model to the service behind it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dsv4.chat import ChatTokenizer, detect_revision
from dsv4.config import EngineConfig, ModelConfig
from dsv4.default_model import resolve_model
from dsv4.engine.client import EngineClient
from dsv4.errors import CheckpointError, ConfigurationError, Dsv4Error
from dsv4.triton.api import BackendUtils
from dsv4.triton.encode import EncodeService
from dsv4.triton.metrics import MetricsPublisher
from dsv4.triton.service import START_FAILURE_PREFIX, EngineService

ENGINE_MODEL = "deepseek_v4"
ENGINE_FILE = "engine.json"
_logger = logging.getLogger(__name__)


def start_engine_service(api: BackendUtils, arguments: Mapping[str, str]) -> EngineService:
    """Start the engine of `deepseek_v4` and the service in front of it, and wait until it is ready.

    `arguments` are those of `initialize`. The reason of a failure goes to the log in one line; raises Dsv4Error.
    """
    configure_logging()
    try:
        config = read_engine_config(arguments)
        metrics = MetricsPublisher(api, {"model": arguments["model_name"], "version": arguments["model_version"]})
        service = EngineService(api, lambda: EngineClient(config, on_progress=_log_progress), metrics=metrics)
        service.start()
    except Dsv4Error as error:
        _logger.error("%s%s", START_FAILURE_PREFIX, " ".join(str(error).split()))
        raise
    return service


def make_encode_service(api: BackendUtils, arguments: Mapping[str, str]) -> EncodeService:
    """The service of `deepseek_v4_encode`, with the tokenizer of the engine's checkpoint. Raises Dsv4Error."""
    configure_logging()
    try:
        config = read_engine_config(arguments)
        directory = resolve_model(config.model)
        model_config = ModelConfig.from_directory(directory)
        return EncodeService(
            api,
            ChatTokenizer.from_directory(directory),
            revision=read_revision(directory),
            max_model_len=config.resolve_max_model_len(model_config.max_position_embeddings),
        )
    except Dsv4Error as error:
        _logger.error("%s%s", START_FAILURE_PREFIX, " ".join(str(error).split()))
        raise


def read_engine_config(arguments: Mapping[str, str]) -> EngineConfig:
    """The engine's flags from its engine.json (`DSV4_ENGINE_CONFIG` names another) and the environment.

    Every model of the repository reads the file of `deepseek_v4`, which lies beside it.
    """
    explicit = os.environ.get("DSV4_ENGINE_CONFIG")
    if explicit:
        return EngineConfig.build(file=Path(explicit))
    engine_model = Path(arguments["model_repository"]).resolve().parent / ENGINE_MODEL
    versions = sorted(engine_model.glob(f"*/{ENGINE_FILE}"), key=lambda path: path.parent.name)
    return EngineConfig.build(file=versions[-1] if versions else None)


def read_revision(directory: Path) -> str:
    """The chat revision that a checkpoint wants. Raises CheckpointError or ConfigurationError."""
    encoding = directory / "encoding" / "encoding_dsv4.py"
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        source = encoding.read_text(encoding="utf-8", errors="replace") if encoding.is_file() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{directory / 'config.json'} must hold a JSON object")
    return detect_revision(config, source).value


def configure_logging() -> None:
    """Log to standard error, which is that of tritonserver."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="dsv4: %(message)s")


def _log_progress(text: str) -> None:
    _logger.info("%s", text)

"""Settings of the proxy: one dataclass, one command line."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4.errors import ConfigurationError

from dsv4_clients.proxy.sampling import read_generate_config

API_KEYS_VARIABLE = "DSV4_API_KEYS"


@dataclass(frozen=True, kw_only=True)
class ProxySettings:
    """Everything that can be set. Sizes are in bytes, times in seconds; None switches a limit off."""

    host: str = "127.0.0.1"
    port: int = 8225
    triton: str = "127.0.0.1:8001"
    triton_metrics: str | None = "http://127.0.0.1:8002/metrics"
    triton_channels: int = 4
    served_model_names: tuple[str, ...] = ("deepseek_v4",)
    generate_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 1024 * 1024
    max_prompt_tokens: int | None = None
    max_concurrent_requests: int | None = None
    max_concurrent_requests_per_key: int | None = None
    request_timeout_seconds: float | None = None
    body_timeout_seconds: float = 30.0
    keep_alive_seconds: float = 15.0
    shutdown_timeout_seconds: int = 60
    allowed_origins: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    access_log: bool = True
    log_level: str = "info"
    playground: bool = True


def read_settings(arguments: Sequence[str] | None = None) -> ProxySettings:
    """Settings from the command line and the environment. Raises ConfigurationError for a wrong value."""
    given = vars(build_parser().parse_args(arguments))
    keys = [*given.pop("api_key"), *_keys_of_file(given.pop("api_key_file")), *_keys_of_environment()]
    return ProxySettings(
        **{
            **given,
            "served_model_names": tuple(given["served_model_names"]),
            "allowed_origins": tuple(given["allowed_origins"]),
            "trusted_hosts": tuple(given["trusted_hosts"]),
            "triton_metrics": given["triton_metrics"] or None,
            "generate_config": _read_generate_config(given["generate_config"]),
            "api_keys": tuple(dict.fromkeys(keys)),
        }
    )


def build_parser() -> argparse.ArgumentParser:
    """The command line of `python -m dsv4_clients.proxy` and `dsv4 proxy`."""
    default = ProxySettings()
    parser = argparse.ArgumentParser(
        prog="dsv4 proxy",
        description="OpenAI-compatible HTTP API in front of one tritonserver that serves deepseek_v4.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default=default.host, help="address to listen on")
    add("--port", type=int, default=default.port, help="port to listen on")
    add("--triton", metavar="HOST:PORT", default=default.triton, help="gRPC endpoint of tritonserver")
    add("--triton-metrics", metavar="URL", default=default.triton_metrics, help="merged into /metrics; '' for none")
    add("--triton-channels", type=_at_least(int, 1), default=default.triton_channels, help="gRPC connections")
    add(
        "--served-model-name",
        dest="served_model_names",
        nargs="+",
        default=list(default.served_model_names),
        metavar="NAME",
        help="names that requests may use; the first one is written into answers",
    )
    add("--generate-config", metavar="JSON", default="{}", help="server-wide sampling defaults")
    add("--tokenizer", type=Path, metavar="DIR", help="checkpoint directory, for /tokenize of text and /detokenize")
    add("--api-key", action="append", default=[], metavar="KEY", help=f"may be repeated; also {API_KEYS_VARIABLE}")
    add("--api-key-file", type=Path, metavar="FILE", help="one key a line; # starts a comment")
    add("--max-body-bytes", type=_at_least(int, 1), default=default.max_body_bytes, help="larger bodies get 413")
    add("--max-prompt-tokens", type=_at_least(int, 1), help="longer prompts get 400")
    add("--max-concurrent-requests", type=_at_least(int, 1), help="more generation requests at once get 429")
    add("--max-concurrent-requests-per-key", type=_at_least(int, 1), help="the same, for each API key")
    add(
        "--request-timeout",
        dest="request_timeout_seconds",
        type=_at_least(float, 0.001),
        metavar="SECONDS",
        help="deadline of a generation, waiting included; then 504",
    )
    add(
        "--body-timeout",
        dest="body_timeout_seconds",
        type=_at_least(float, 0.001),
        default=default.body_timeout_seconds,
        metavar="SECONDS",
        help="time to receive a request body; then 408",
    )
    add(
        "--keep-alive",
        dest="keep_alive_seconds",
        type=_at_least(float, 0.001),
        default=default.keep_alive_seconds,
        metavar="SECONDS",
        help="a silent event stream gets a comment this often",
    )
    add(
        "--shutdown-timeout",
        dest="shutdown_timeout_seconds",
        type=_at_least(int, 0),
        default=default.shutdown_timeout_seconds,
        metavar="SECONDS",
        help="time that running requests get on SIGTERM",
    )
    add(
        "--allowed-origin",
        dest="allowed_origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow browsers of this origin (CORS); '*' for all; may be repeated",
    )
    add(
        "--trusted-host",
        dest="trusted_hosts",
        action="append",
        default=[],
        metavar="HOST",
        help="refuse other Host headers; '*.example.com' works; may be repeated",
    )
    add("--tls-certificate", type=Path, metavar="FILE", help="PEM certificate chain; turns on TLS")
    add("--tls-key", type=Path, metavar="FILE", help="PEM private key")
    add("--no-access-log", dest="access_log", action="store_false", help="no access log line per request")
    add(
        "--log-level", choices=["debug", "info", "warning", "error"], default=default.log_level, help="level of the log"
    )
    add("--no-playground", dest="playground", action="store_false", help="no chat page at /")
    return parser


def _at_least(kind: Any, minimum: float) -> Any:
    def read(text: str) -> Any:
        value = kind(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {text}")
        return value

    read.__name__ = kind.__name__
    return read


def _read_generate_config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"--generate-config: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigurationError("--generate-config: must be a JSON object")
    return read_generate_config(config)


def _keys_of_file(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"--api-key-file: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigurationError(f"--api-key-file: {path} holds no key")
    return keys


def _keys_of_environment() -> list[str]:
    return [key.strip() for key in os.environ.get(API_KEYS_VARIABLE, "").split(",") if key.strip()]

"""Running the application under uvicorn."""

from __future__ import annotations

from typing import Any

import uvicorn
from dsv4.errors import ConfigurationError

from dsv4_clients.proxy.app import build_app
from dsv4_clients.proxy.middleware.request_log import ACCESS_LOGGER
from dsv4_clients.proxy.settings import ProxySettings


def run_proxy(settings: ProxySettings) -> None:
    """Serve until SIGINT or SIGTERM; running requests get `shutdown_timeout_seconds`. Raises ConfigurationError."""
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise ConfigurationError("--tls-certificate and --tls-key belong together")
    uvicorn.run(
        build_app(settings),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        server_header=False,
        log_config=log_config(settings.log_level.upper()),
        timeout_graceful_shutdown=settings.shutdown_timeout_seconds,
        timeout_keep_alive=75,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )


def log_config(level: str) -> dict[str, Any]:
    """Everything goes to standard error; the access log is bare JSON lines."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "text": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
            "bare": {"format": "%(message)s"},
        },
        "handlers": {
            "text": {"class": "logging.StreamHandler", "formatter": "text"},
            "bare": {"class": "logging.StreamHandler", "formatter": "bare"},
        },
        "loggers": {
            "dsv4_clients": {"handlers": ["text"], "level": level, "propagate": False},
            ACCESS_LOGGER: {"handlers": ["bare"], "level": "INFO", "propagate": False},
            "uvicorn": {"handlers": ["text"], "level": level, "propagate": False},
        },
    }

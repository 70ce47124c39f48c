"""One real server for all tests that need it, in tests/integration and tests/e2e."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.server import Server, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """`dsv4 serve` with the shipped model and MTP."""
    with running_server("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}') as running:
        yield running

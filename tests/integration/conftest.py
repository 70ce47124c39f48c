"""One real server for all tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.greedy import all_tokens
from tests.integration.server import Server, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """`dsv4 serve` with the shipped model and MTP."""
    with running_server("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}') as running:
        yield running


@pytest.fixture(scope="session")
def greedy_tokens(server: Server) -> dict[str, list[int]]:
    """What every prompt gives on the session's server, which has one draft, alone and streamed."""
    return all_tokens(server)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/integration/" in item.nodeid:
            item.add_marker(pytest.mark.integration)

"""What the tests against the real server share; the server itself is in tests/conftest.py."""

from __future__ import annotations

import pytest

from tests.integration.greedy import all_tokens
from tests.integration.server import Server


@pytest.fixture(scope="session")
def greedy_tokens(server: Server) -> dict[str, list[int]]:
    """What every prompt gives on the session's server, which has one draft, alone and streamed."""
    return all_tokens(server)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/integration/" in item.nodeid:
            item.add_marker(pytest.mark.integration)

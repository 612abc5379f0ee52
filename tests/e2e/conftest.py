"""One server for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from tests.fixtures import fixture_dir


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Serves the qwen3 fixture under the public name `local`."""
    with Server(MODEL_PATH=str(fixture_dir("qwen3")), PROXY_MODEL_ID="local") as running:
        yield running

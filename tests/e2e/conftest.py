"""One server for all tests that leave it as they found it; and the files' order."""

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

# Imported where they are used: the process that deals the tests out runs none, and all wait for it.
if TYPE_CHECKING:
    from tests.helpers.clients.sdk_conversations import Sdks
    from tests.helpers.servers.scripted_server import ScriptedServer
    from tests.helpers.servers.server import Server

# Files that take longest, longest first: one that starts last keeps a core busy alone.
LONGEST: Final = (
    *("test_models", "test_restart", "test_broken_caches", "test_bench_command"),
    *("test_docs_snippets", "test_told_facts", "test_security_restart"),
    *("test_remote", "test_security", "test_dashboard", "test_eval", "test_figures"),
    *("test_fallbacks", "test_crossings", "test_clients", "test_edits", "test_cloud_clients"),
    *("test_lifecycle", "test_chaos", "test_faults", "test_cache_routes"),
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    """Add to a failure what the test's servers are at: one that has ended is why."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if hasattr(value, "state_text"):
                report.sections.append((name, value.state_text()))
    return report


@pytest.fixture(scope="session")
def server() -> "Iterator[Server]":
    """Serves the qwen3 fixture under the public name `local`."""
    from tests.helpers.servers.server import Server

    with Server() as running:
        yield running


@pytest.fixture(scope="session")
def scripted() -> "Iterator[ScriptedServer]":
    """Serves a model that says what it is told to, under the name that clients are set up for."""
    from tests.helpers.servers.scripted_server import ScriptedServer

    with ScriptedServer() as running:
        yield running


@pytest.fixture(scope="session")
def sdks(scripted: "ScriptedServer") -> "Iterator[Sdks]":
    from tests.helpers.clients.sdk_conversations import sdks_of

    with sdks_of(scripted) as both:
        yield both

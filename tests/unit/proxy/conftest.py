"""Shortens the waits that tests of the proxy would otherwise sit through."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.proxy.monitoring import dashboard
from hearth.proxy.pool import worker_pool


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the pool wait 2 s at most for a worker's status."""
    monkeypatch.setattr(worker_pool, "STATUS_WAIT_S_MAX", 2.0)


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Lets polls of the workers follow each other at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dashboard, "POLL_S", 0.001)
        yield


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path: a Unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        yield Path(name)

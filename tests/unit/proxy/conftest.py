"""Shortens the waits that tests of the proxy would otherwise sit through."""

import asyncio
import inspect
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from hearth.proxy.monitoring import worker_poller
from hearth.proxy.pool import worker_link

TEST_S_MAX: Final = 180.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the pool wait 2 s at most for a worker's status."""
    monkeypatch.setattr(worker_link, "STATUS_WAIT_S_MAX", 2.0)


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Lets polls of the workers follow each other at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_poller, "POLL_S", 0.001)
        yield


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path: a Unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        yield Path(name)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on a loop of its own, for TEST_S_MAX at most.

    Its module's LOOP_FACTORY makes the loop, where it has one.
    """
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    factory = getattr(pyfuncitem.module, "LOOP_FACTORY", None)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(test(**given), TEST_S_MAX))
    return True

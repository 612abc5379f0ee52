"""Runs tests that are coroutines, each on an event loop of its own."""

import asyncio
import inspect
from typing import Final

import pytest

TEST_S_MAX: Final = 180.0


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

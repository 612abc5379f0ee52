"""Marks every test by what it needs, and chooses how hypothesis draws its examples."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# What is imported and collected lives as long as the process: Python's collector, which walks
# through it over and over, waits until all of it is there, and then leaves it alone.
gc.disable()

pytest.register_assert_rewrite("tests.helpers")  # before any of them is imported
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network
os.environ.setdefault("LITELLM_MODE", "PRODUCTION")  # else its import reads .env files
os.environ["HEARTH_MODELS_DIR"] = "/nonexistent"  # the user's own builtin models

from tests.helpers.left_count import LeftCount  # noqa: E402
from tests.helpers.marks import marks_of  # noqa: E402
from tests.helpers.tie_count import TieCount  # noqa: E402

# A busy machine draws examples slowly, and a first example may import a model's code: no verdict.
settings.register_profile("hearth", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The circles of tests/helpers/run_suite.py. The same examples each time, so that a change is judged
# by the change and not by chance; `all` tries new ones, and more.
CIRCLES = {"fast": 10, "test": 25, "all": 100}
for circle, count in CIRCLES.items():
    parent = settings.get_profile("hearth")
    again = circle != "all"
    settings.register_profile(circle, parent, max_examples=count, derandomize=again)
settings.load_profile(os.environ.get("HEARTH_HYPOTHESIS_PROFILE", "test"))

TESTS_DIR = Path(__file__).parent
IMPURE = {"e2e", "model", "process"}
# asyncio's own pair of sockets neither binds nor connects, and is not counted.
WORLD = {"os.fork", "os.posix_spawn", "socket.bind", "socket.connect", "subprocess.Popen"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rooms = {name: rank for rank, name in enumerate(("e2e", "property", "unit"))}
    items.sort(key=lambda item: rooms.get(item.path.relative_to(TESTS_DIR).parts[0], len(rooms)))
    for item in items:
        for name in sorted(marks_of(item.path)):
            item.add_marker(name)
        if not IMPURE & {mark.name for mark in item.iter_markers()}:
            item.add_marker("pure")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:  # of xdist's processes the one that collects nothing has it too
    gc.freeze()
    gc.enable()


class PureGuard:
    """Fails a pure test that starts a process or opens a socket.

    Owner: the process that runs the tests, which it watches from its start on.
    """

    def __init__(self) -> None:
        self.is_pure = False
        sys.addaudithook(self.watch)

    def watch(self, event: str, arguments: Any) -> None:
        if self.is_pure and event in WORLD:
            raise AssertionError(f"a pure test needs the mark `process`: {event} {arguments}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        self.is_pure = item.get_closest_marker("pure") is not None
        try:
            return (yield)
        finally:
            self.is_pure = False


class MemoryLimitGuard:
    """Fails a test that leaves MLX another memory limit than it found.

    Above its limit MLX waits for each operation by itself, and all later tests take several times
    as long.
    """

    def __init__(self) -> None:
        self.limit: int | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        mx = sys.modules.get("mlx.core")  # most tests need none
        self.limit = mx.get_memory_limit() if mx else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Any:
        done = yield
        if self.limit is not None:
            left = sys.modules["mlx.core"].set_memory_limit(self.limit)
            assert left == self.limit, f"MLX's memory limit is {left} and was {self.limit}"
        return done


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(PureGuard(), "pure-guard")
    config.pluginmanager.register(MemoryLimitGuard(), "memory-limit-guard")
    config.pluginmanager.register(TieCount(), "tie-count")
    config.pluginmanager.register(LeftCount(config), "left-count")

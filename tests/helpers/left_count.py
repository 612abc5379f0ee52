"""Counts the tests that a run left out, by their marks, and says so at its end."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import pytest

from tests.helpers.run_suite import LEFT

KEY: Final = "left out"


class LeftCount:
    """What was left out of a session, from one of the processes of xdist, which all collect alike.

    Owner: the process that runs the session.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self.left: Counter[str] = Counter()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            marks = {mark.name for mark in item.iter_markers()}
            self.left[next((mark for mark in LEFT if mark in marks), "others")] += 1

    def pytest_sessionfinish(self) -> None:
        if self.output is not None:
            self.output[KEY] = dict(self.left)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.left = Counter(getattr(node, "workeroutput", {}).get(KEY, self.left))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left:
            told = ", ".join(f"{count:,} {mark}" for mark, count in self.left.most_common())
            terminalreporter.write_line(f"not run: {told}")

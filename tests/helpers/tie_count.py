"""Counts what a session's tests compared with cold answers; too many ties fail the session."""

import sys
from typing import Any, Final

import pytest

NAME: Final = "compared with cold answers"
SHARE_MAX: Final = 0.003  # of compared tokens; beside that one tie may always be


class TieCount:
    """Adds up what each test's report brings, from the processes of xdist too.

    Owner: the process that runs the session.
    """

    def __init__(self) -> None:
        self.exact, self.answers, self.tokens = 0, 0, 0
        self.ties: list[str] = []

    @property
    def is_too_much(self) -> bool:
        return len(self.ties) > 1 + SHARE_MAX * self.tokens

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        try:
            return (yield)
        finally:
            margins = sys.modules.get("scripts.harness.warm.token_margins")
            told = margins.COUNTED.take() if margins is not None else None
            if told is not None and told.exact + told.answers:
                row = (told.exact, told.answers, told.tokens, told.ties)
                item.user_properties.append((NAME, row))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: list[tuple[str, Any]] = report.user_properties
        for name, told in properties if report.when == "call" else ():
            if name == NAME:
                exact, answers, tokens, ties = told
                self.exact, self.answers = self.exact + exact, self.answers + answers
                self.tokens += tokens
                self.ties += [f"{report.nodeid}: {tie}" for tie in ties]

    def pytest_sessionfinish(self, session: Any) -> None:
        if self.is_too_much and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.exact + self.answers:
            for tie in self.ties:
                terminalreporter.write_line(f"tie: {tie}")
            told = f"answers {NAME}: {self.exact:,} to the bit, {self.answers:,} by token"
            told += f"; of {self.tokens:,} tokens {len(self.ties)} were ties"
            too_many = f", more than {SHARE_MAX:.1%} and one" if self.is_too_much else ""
            terminalreporter.write_line(told + too_many, red=self.is_too_much)

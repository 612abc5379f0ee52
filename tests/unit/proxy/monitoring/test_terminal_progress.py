"""Checks the line of progress on the server's terminal, with a clock and a stream of our own."""

import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from hearth.proxy.monitoring.terminal_progress import LONG_S, TerminalProgress
from hearth.shared import logging_setup as logs
from hearth.shared.logging_setup import CLEAR_LINE

LOAD: dict[str, Any] = {
    **{"id": 0, "state": "loading"},
    "loading": {"step": "weights", "s": 75.0, "held_bytes": 5 * 2**30, "of_bytes": 20 * 2**30},
}
READY: dict[str, Any] = {"id": 1, "state": "ready", "loading": None}
PREFILL: dict[str, Any] = {
    **{"request_id": "r", "prompt_tokens": 8_000, "cached_tokens": 0, "done_tokens": 1_000},
    **{"age_s": 9.0, "client": "Pi 1.2", "title": "never told", "session": "s"},
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Stage:
    """A server whose workers and prefills are set by hand."""

    def __init__(self) -> None:
        self.workers: list[dict[str, Any]] = [READY]
        self.prefills: list[dict[str, Any]] = []
        self.now = 0.0
        self.terminal = Terminal()
        self.progress = TerminalProgress(
            self.terminal, lambda: self.workers, lambda: self.prefills, lambda: self.now
        )


@pytest.fixture(autouse=True)
def terminal_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def root_handlers() -> Iterator[None]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    levels = {name: logging.getLogger(name).level for name in ("", *logs.OURS)}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_a_load_tells_its_step_and_how_much_of_it_is_there() -> None:
    stage = Stage()
    stage.workers = [LOAD, READY]
    bar = "[###.........] 25 %"
    assert stage.progress.text() == f"worker 0 loads: weights {bar} 5.0 of 20.0 GB, 75 s"
    unknown = {**LOAD["loading"], "step": "files", "of_bytes": 0, "held_bytes": 0, "s": 3.0}
    stage.workers = [LOAD | {"loading": unknown}]
    assert stage.progress.text() == "worker 0 loads: files, 3 s"


def test_a_prefill_tells_who_waits_how_far_it_is_and_how_long_it_takes_yet() -> None:
    stage = Stage()
    stage.prefills = [PREFILL]
    assert stage.progress.text() == "Pi 1.2: prompt [#...........] 12 % of 8,000"
    stage.now = 10.0
    stage.prefills = [PREFILL | {"done_tokens": 2_000}]
    told = "Pi 1.2: prompt [###.........] 25 % of 8,000, 100 tok/s, 60 s left"
    assert stage.progress.text() == told
    stage.prefills = [PREFILL | {"done_tokens": 1_100}]
    assert stage.progress.text().endswith(", 10 tok/s, 11 min left")
    assert "never told" not in stage.progress.text()


def test_short_prefills_are_not_worth_a_line_and_of_many_the_longest_is_told() -> None:
    stage = Stage()
    stage.prefills = [PREFILL | {"age_s": LONG_S - 0.1}]
    assert stage.progress.text() == ""
    longer = PREFILL | {"request_id": "q", "prompt_tokens": 90_000, "client": ""}
    stage.prefills = [PREFILL, longer]
    text = stage.progress.text()
    assert text.startswith("a client: prompt [") and text.endswith("  (and 1 more)")


def test_the_line_is_drawn_over_itself_and_cleared_once() -> None:
    stage = Stage()
    stage.progress.draw()
    assert stage.terminal.getvalue() == "", "there is nothing to tell"
    stage.workers = [LOAD]
    stage.progress.draw()
    stage.progress.draw()
    line = f"{CLEAR_LINE}{stage.progress.text()}"
    assert stage.terminal.getvalue() == line * 2
    stage.workers = [READY]
    stage.progress.draw()
    stage.progress.draw()
    assert stage.terminal.getvalue() == line * 2 + CLEAR_LINE


def test_the_line_is_never_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    stage.workers = [LOAD]
    monkeypatch.setenv("COLUMNS", "30")
    stage.progress.draw()
    assert len(stage.terminal.getvalue()) == len(CLEAR_LINE) + 29


@pytest.mark.usefixtures("root_handlers")
@pytest.mark.parametrize(("kind", "begin"), [("xterm", CLEAR_LINE), ("dumb", "")])
def test_a_line_of_the_log_clears_the_progress_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, kind: str, begin: str
) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setattr("sys.stderr", terminal)
    logs.configure("INFO", "proxy")
    logging.getLogger("hearth.test").info("it works")
    assert terminal.getvalue().startswith(begin)
    assert (CLEAR_LINE in terminal.getvalue()) is bool(begin)
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    logs.configure("INFO", "proxy")
    logging.getLogger("hearth.test").info("it works")
    assert "\x1b" not in file.getvalue() and "it works" in file.getvalue()

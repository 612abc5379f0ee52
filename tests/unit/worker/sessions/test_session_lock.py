"""A request that ends waits neither for another's prompt nor for the journal's disk."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.durable_journal import Journal
from hearth.shared.wire_messages import Speaker
from hearth.worker.sessions import session_manager as module
from hearth.worker.sessions.session_context import KEPT
from hearth.worker.sessions.session_manager import SessionManager, SessionRules
from tests.helpers.worker.session_prompts import ME, QUESTION, SAID, SLACK, WORDS, Desk, Rows, echo

WAIT_S_MAX = 60.0  # for what takes no time where nobody is in its way
OTHER = Speaker("key", "s2")
# What arriving does whose cost grows with a prompt's messages, its calls or its tools.
LONG_STEPS = (
    "shape_of",
    "match_line",
    "_referenced_tools",
    "_session_facts",
    "turn_content",
    "is_echo",
)
FOLLOWED = [*QUESTION, echo(WORDS), QUESTION[1]]


class Gate:
    """A step that does not end before it is let go."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.is_open = threading.Event()

    def __call__(self) -> None:
        self.is_reached.set()
        assert self.is_open.wait(WAIT_S_MAX)

    def before(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **named: Any) -> Any:
            self()
            return step(*args, **named)

        return held


@contextmanager
def running(gate: Gate, work: Callable[[], object]) -> Iterator[None]:
    """Have `work` stand at `gate` in a thread of its own while the block runs."""
    thread = threading.Thread(target=work)
    thread.start()
    assert gate.is_reached.wait(WAIT_S_MAX)
    try:
        yield
    finally:
        gate.is_open.set()
        thread.join(WAIT_S_MAX)


def gets_through(work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT_S_MAX)
    return not thread.is_alive()


@pytest.mark.parametrize("step", LONG_STEPS)
def test_a_request_ends_while_anothers_long_prompt_is_looked_at(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, gate = Desk(), Gate()
    desk.ask(QUESTION, WORDS)
    other = desk.arrive(QUESTION, OTHER)
    monkeypatch.setattr(module, step, gate.before(getattr(module, step)))
    with running(gate, lambda: desk.arrive(FOLLOWED)):
        assert gets_through(lambda: desk.end(other, SAID)), f"{step} holds the lock"
    assert other.turn is not None and desk.sessions.counters()["turns"] == 2


def test_a_request_ends_while_the_journal_is_written_anew() -> None:
    desk, gate = Desk(), Gate()
    desk.ask(QUESTION, WORDS)
    other = desk.arrive(QUESTION, OTHER)

    def write_all() -> None:
        for _ in desk.sessions.all_entries():
            gate()

    with running(gate, write_all):
        assert gets_through(lambda: desk.end(other, SAID))
        assert gets_through(lambda: desk.arrive(FOLLOWED))


def test_a_request_ends_while_a_disk_takes_no_byte_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, gate = Desk(), Gate()
    monkeypatch.setattr(Journal, "append", gate.before(Journal.append))
    desk.sessions = SessionManager(SessionRules(), Rows(), SLACK, tmp_path)
    with running(gate, lambda: desk.ask(QUESTION, WORDS)):
        assert gets_through(lambda: desk.ask(FOLLOWED, SAID))
        assert gets_through(desk.sessions.counters)
    desk.sessions.close()
    again = SessionManager(SessionRules(), Rows(), SLACK, tmp_path)
    assert again.counters()["turns"] == 2, "what waited for the disk is written"
    again.close()


def test_a_cache_that_is_emptied_amid_an_arrival_leaves_a_request_that_can_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS)
    match = module.match_line

    def emptied_first(*args: Any) -> Any:
        desk.sessions.forget_lines()
        return match(*args)

    monkeypatch.setattr(module, "match_line", emptied_first)
    visit = desk.arrive(FOLLOWED)
    assert visit.states == {2: KEPT} and visit.kind == "main"
    desk.end(visit, SAID)
    (line,) = visit.line_match.session.lines.values()
    assert line.turns == 1 and line.parent is None
    assert [row["session"] for row in desk.sessions.session_rows(ME.key)] == [ME.session]
    desk.sessions.lines.check()

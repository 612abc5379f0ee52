"""Checks that turns, lines and sessions outlive the worker that remembers them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hearth.shared import durable_journal as journal
from hearth.shared.wire_messages import Prompt, Speaker
from hearth.worker.sessions import conversation_lines, turn_store
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.session_archive import ArchiveEntry
from hearth.worker.sessions.session_context import KEPT, RENDERED, SessionContext
from hearth.worker.sessions.session_manager import SessionManager, SessionRules
from tests.helpers.records.archive_records import ME, plain
from tests.helpers.worker import session_prompts
from tests.helpers.worker.session_prompts import QUESTION, SLACK, WORDS

WAIT_S = 60.0
ECHO = {"role": "assistant", "content": WORDS.content}
LOADER = {"role": "tool", "content": "", "tool_references": ["grep"]}
GREP = {"type": "function", "function": {"name": "grep"}}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "turns-0"


class Desk(session_prompts.Desk):
    """Sessions that are remembered in a directory; the model's answers are scripted."""

    def __init__(self, home: Path | None, **rules: Any) -> None:
        super().__init__(**rules)
        self.sessions = SessionManager(SessionRules(**rules), self.log, SLACK, home)

    def ask(
        self,
        messages: Sequence[dict[str, Any]],
        said: TurnContent = WORDS,
        sampled: Sequence[int] = (1, 2),
        speaker: Speaker = ME,
        **more: Any,
    ) -> SessionContext:
        return super().ask(messages, said, sampled, speaker, **{"signature": "", **more})

    def flush(self) -> None:
        writer = self.sessions.archive.journal
        assert isinstance(writer, journal.JournalWriter) and writer.flush(WAIT_S)


@pytest.fixture
def desks(home: Path) -> Iterator[Any]:
    """A function that ends the worker before, and starts the next."""
    made: list[Desk] = []

    def start(**rules: Any) -> Desk:
        for desk in made[-1:]:
            desk.sessions.close()
        made.append(Desk(home, **rules))
        return made[-1]

    yield start
    made[-1].sessions.close()


# ---------------------------------------------------------------- several workers


def test_a_worker_finds_what_its_neighbours_had_said_when_it_started(home: Path) -> None:
    one = Desk(home)
    first = one.ask(QUESTION)
    one.flush()
    two = Desk(home)
    visit = two.arrive([*QUESTION, ECHO, QUESTION[1]])
    assert visit.states == {2: KEPT} and visit.line_match.line is not None
    two.end(visit, WORDS, (5, 6))
    for desk in (one, two):
        desk.sessions.close()
    three = Desk(home)
    again = three.arrive([*QUESTION, ECHO, QUESTION[1], ECHO, QUESTION[1]])
    assert again.states == {2: KEPT, 4: KEPT}
    assert first.turn is not None and again.turns[2] is not None
    assert plain(again.turns[2]) == plain(first.turn)
    assert len(again.line_match.session.lines) == 1
    three.sessions.close()


# ---------------------------------------------------------------- sessions


def test_what_a_line_is_known_by_outlives_the_worker_but_for_its_title(
    desks: Any, home: Path
) -> None:
    first = desks()
    names = {"client": "pi", "client_name": "Pi 1.2", "title": "Xylophone"}
    first.ask(QUESTION, speaker=Speaker("key", conversation="pi-1", **names))
    first.ask(QUESTION, speaker=Speaker("key", "s1", **names))
    before = first.sessions.session_rows()
    assert [row["title"] for row in before] == ["Xylophone", "Xylophone"]
    after = desks().sessions.session_rows()
    assert [row["session"] for row in after] == ["s1", "pi-1"]
    assert [row | {"idle_s": 0} for row in after] == [
        row | {"idle_s": 0, "title": "", "client": "Pi 1.2"} for row in before
    ]
    files = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    assert any(b"Pi 1.2" in each for each in files)
    assert not any(b"Xylophone" in each for each in files)


def test_a_session_is_known_as_it_was(desks: Any) -> None:
    first = desks()
    parent = first.ask(QUESTION)
    first.ask([*QUESTION, ECHO, QUESTION[1]])
    first.ask([*QUESTION, {"role": "user", "content": "else"}], TurnContent("", "no", ()))
    first.ask(QUESTION[1:], speaker=Speaker("key", "s1", "helper", "s1"))
    first.ask(QUESTION[1:], speaker=Speaker(""))
    told, report = first.sessions.lines_report("s1"), first.sessions.session_rows()
    counts = first.sessions.counters()
    second = desks()
    assert second.sessions.lines_report("s1") == told
    assert [row | {"idle_s": 0} for row in second.sessions.session_rows()] == [
        row | {"idle_s": 0} for row in report
    ]
    assert second.sessions.counters()["turn_bytes"] == counts["turn_bytes"] > 0
    assert told is not None and [line["parent"] for line in told["lines"]] == [None, 1, None]
    again = second.ask([*QUESTION, ECHO, QUESTION[1], ECHO, QUESTION[1]])
    assert again.line_match.line is not None and again.line_match.line.number == 1
    opened = second.ask([{"role": "user", "content": "new"}])
    numbers = [line.number for line in opened.line_match.session.lines.values()]
    assert numbers == [1, 3, 6], "none is given twice; a rewritten end is its line's conversation"
    assert parent.turn is not None


def test_tools_that_a_session_loaded_are_remembered_also_without_its_lines(desks: Any) -> None:
    first = desks()
    first.end(first.arrive([*QUESTION, LOADER], deferred=[GREP]), WORDS)
    first.sessions.forget_lines()
    compacted = [QUESTION[0], {"role": "user", "content": "a summary"}]
    for _ in range(2):
        desk = desks()
        visit = desk.arrive(compacted)
        assert visit.loaded == ["grep"] and visit.line_match.earlier is None
        assert desk.arrive([*QUESTION, ECHO, QUESTION[1]]).states != {}
        everything = list(desk.sessions.all_entries())
        desk.sessions.archive.lost()
        for entry in everything:
            desk.sessions.archive.add(entry)
        desk.flush()


def test_lines_that_were_forgotten_stay_so_and_later_ones_do_not(desks: Any) -> None:
    first = desks()
    first.ask(QUESTION)
    first.sessions.forget_lines()
    later = first.ask([{"role": "user", "content": "later"}])
    second = desks()
    session = second.arrive([*QUESTION, ECHO]).line_match.session
    (line,) = session.lines.values()
    assert line.shape.names == later.line_match.shape.names
    assert second.arrive([*QUESTION, ECHO]).states == {2: KEPT}, "turns are not lines"


def test_what_a_restart_lost_is_told_as_such_and_only_once(desks: Any) -> None:
    history = QUESTION * 20
    desks().ask(history)
    desk = desks()
    visit = desk.arrive([*history, ECHO, QUESTION[1]])
    lost = desk.end(visit, WORDS, cached=0)
    assert lost is not None and lost["cause"] == "restart" and "MAX_KV_SIZE_GB" in lost["remedy"]
    visit = desk.arrive([*history, ECHO, QUESTION[1], ECHO, QUESTION[1]])
    lost = desk.end(visit, WORDS, cached=0)
    assert lost is not None and lost["cause"] == "eviction"


def test_a_session_that_was_idle_for_too_long_is_not_taken_up(
    desks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desks().ask(QUESTION)
    started = time.time
    desk = desks(idle_s=60.0)
    assert desk.arrive([*QUESTION, ECHO]).line_match.line is not None
    monkeypatch.setattr(time, "time", lambda: started() + 61.0)
    assert desks(idle_s=60.0).arrive([*QUESTION, ECHO]).line_match.line is None
    monkeypatch.setattr(time, "time", lambda: started() - 1_000.0)  # the clock was put back
    last = desks(idle_s=60.0)
    assert last.sessions.session_rows()[0]["idle_s"] >= 0.0
    assert last.arrive([*QUESTION, ECHO]).line_match.line is not None


def test_thinking_comes_back_although_its_turn_is_not_kept(
    desks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = desks()
    first.ask(QUESTION)
    monkeypatch.setattr(journal, "REWRITE_BYTES_MIN", 0)
    monkeypatch.setattr(journal, "RETRY_S", 0.0)
    first.sessions.turns = turn_store.TurnStore()
    first.ask([{"role": "user", "content": "more"}], replace(WORDS, reasoning="easy"))
    first.flush()
    visit = desks().arrive([*QUESTION, ECHO, QUESTION[1]])
    assert visit.states == {2: RENDERED} and visit.healed == 1
    assert visit.messages[2]["reasoning_content"] == WORDS.reasoning


def test_of_two_thoughts_the_later_one_heals_after_a_rewrite_too(
    desks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "REWRITE_BYTES_MIN", 0)
    monkeypatch.setattr(journal, "RETRY_S", 0.0)
    first = desks()
    silent = replace(WORDS, content="")
    one = first.ask(QUESTION, silent, sampled=(1, 2), signature="one")
    first.ask(QUESTION, replace(silent, reasoning="easy"), sampled=(3, 4), signature="two")
    sent = {"role": "assistant", "content": "", "signatures": ["one"]}
    again = first.ask([*QUESTION, sent, QUESTION[1]])  # which makes it the last used
    assert again.turns[2] is one.turn
    first.flush()
    first.sessions.archive.journal.put(ArchiveEntry(0.0), 0, renews=True)
    first.flush()
    healing = dict(first.sessions.thinking.items())
    assert "easy" in healing.values() and first.sessions.archive.report()["rewritten"]
    assert dict(desks().sessions.thinking.items()) == healing


def test_turns_of_a_line_that_is_in_use_outlive_newer_ones_of_others(
    desks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = desks()
    old = first.ask(QUESTION)
    for number in range(4):
        first.ask([{"role": "user", "content": f"{number}"}], TurnContent("", f"{number}", ()))
    first.ask([*QUESTION, ECHO, QUESTION[1]])
    monkeypatch.setattr(turn_store.TurnStore.__init__, "__defaults__", (3, turn_store.BYTES_MAX))
    second = desks()
    assert second.sessions.counters()["turns"] == 3
    visit = second.arrive([*QUESTION, ECHO, QUESTION[1], ECHO])
    assert visit.states == {2: KEPT, 4: KEPT} and old.turn is not None


@pytest.mark.parametrize(
    ("limit", "value"), [("LINES_MAX", 2), ("SESSIONS_MAX", 2), ("TOKENS_MAX", 50)]
)
def test_no_more_is_taken_up_than_may_be_remembered(
    desks: Any, limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = desks()
    for number in range(6):
        first.ask(QUESTION, speaker=Speaker("key", f"s{number}"))
    monkeypatch.setattr(conversation_lines, limit, value)
    rows = desks().sessions.session_rows()
    assert [row["session"] for row in rows if row["lines"]] == ["s5", "s4"]


# ---------------------------------------------------------------- what is not recorded


def test_a_request_that_is_not_to_be_kept_finds_and_leaves_nothing(desks: Any) -> None:
    desk = desks()
    desk.ask(QUESTION)
    before = (desk.sessions.counters(), desk.sessions.lines_report("s1"))
    for messages, speaker in (([*QUESTION, ECHO, LOADER], ME), (QUESTION, Speaker("key", "new"))):
        names = desk.names.names(messages)[0]
        prompt = Prompt(messages, deferred=[GREP], speaker=speaker, names=names)
        assert desk.sessions.request_arrived(prompt, is_kept=False) is None
    desk.flush()
    assert desk.sessions.lines_report("new") is None
    assert desk.sessions.counters()["turns"] == before[0]["turns"]
    assert desk.sessions.lines_report("s1") == before[1]
    assert desk.arrive([QUESTION[0], {"role": "user", "content": "a summary"}]).loaded == []


def test_without_a_directory_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    desk = Desk(None)
    desk.ask(QUESTION)
    desk.sessions.forget_lines()
    desk.sessions.close()
    assert list(tmp_path.iterdir()) == []
    assert desk.sessions.counters()["archive"] == {}


def test_no_digest_of_a_key_stands_on_the_disk_and_another_key_finds_nothing(
    desks: Any, home: Path
) -> None:
    key = "0123456789abcdef"
    speaker = Speaker(key, "s1")
    first = desks()
    first.ask(QUESTION, speaker=speaker)
    first.sessions.forget_lines()
    first.ask(QUESTION, speaker=speaker)
    second = desks()
    octets = b"".join(path.read_bytes() for path in home.iterdir())
    assert WORDS.content.encode() in octets
    assert key.encode() not in octets and bytes.fromhex(key) not in octets
    assert second.arrive([*QUESTION, ECHO], speaker).states == {2: KEPT}
    for other in (ME, Speaker("", "s1")):
        visit = second.arrive([*QUESTION, ECHO], other)
        assert visit.states == {2: RENDERED} and visit.healed == 0
        assert visit.line_match.line is None

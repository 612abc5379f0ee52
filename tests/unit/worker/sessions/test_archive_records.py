"""Checks the archive's records of turns and lines: what is written, and what is read back."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.shared import durable_journal as journal
from hearth.worker.sessions import session_archive as module
from hearth.worker.sessions.conversation_lines import Line
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.session_archive import ArchiveEntry, SessionArchive
from tests.helpers.records.archive_records import (
    ME,
    grown,
    lines_of,
    loaded,
    plain,
    saved,
    the_file,
    turn,
    turns_of,
)

WAIT_S = 60.0
GREP = {"type": "function", "function": {"name": "grep"}}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "turns-0"


def test_a_turn_comes_back_as_it_was(home: Path) -> None:
    odd = {"n": 5000.0, "i": 5000, "big": 1 << 70, "t": True, "z": None, "s": "\ud83d", "l": [[]]}
    made = [
        turn(1, arguments=odd),
        turn(2, size=0),
        replace(turn(3), answer=TurnContent("", "\x00", ())),
    ]
    saved(home, [ArchiveEntry(1.0, turn=each) for each in made])
    memory, counts = loaded(home)
    assert [plain(each) for each in turns_of(memory)] == [plain(each) for each in made]
    (_, arguments), *_ = turns_of(memory)[0].answer.calls
    assert [type(value) for value in arguments.values()] == [type(value) for value in odd.values()]
    assert turns_of(memory)[0].ids.dtype == np.int32
    assert not counts


def line_entries(line: Line, steps: int, start: int = 0) -> Iterator[ArchiveEntry]:
    for number in range(start, start + steps):
        said = [f"m{each}" for each in range(number + 1)]
        yield grown(line, said, range(1_000 * (number + 1)), at=100.0 + number)


def alike(row: ArchiveEntry, entry: ArchiveEntry) -> bool:
    """Whether a line that came back is what it was."""
    line, state = row.line, entry.line
    assert line is not None and state is not None
    return (
        line.tokens.tolist() == state.tokens.tolist()
        and (line.uid, line.number, line.turns) == (state.uid, state.number, state.turns)
        and (line.shape, line.prompt_tokens) == (state.shape, state.prompt_tokens)
        and (list(line.past.items()), line.rows) == (list(state.past.items()), state.rows)
        and (line.branch_message, line.branch_token) == (state.branch_message, state.branch_token)
    )


def test_of_a_line_only_what_came_to_it_is_written(home: Path) -> None:
    line = Line(3, 0.0)
    entries = list(line_entries(line, 20))
    saved(home, entries)
    memory, counts = loaded(home)
    assert not counts
    (row,) = lines_of(memory)
    assert row.line is not None and alike(row, entries[-1])
    assert (row.speaker, row.at, row.line.is_restored) == (ME, 119.0, True)
    whole = 4 * sum(range(1_000, 21_000, 1_000))
    assert the_file(home).stat().st_size < 4 * 20_000 + 20 * 600 < whole / 8


def test_a_line_that_was_rewritten_from_its_start_is_right(home: Path) -> None:
    line = Line(1, 0.0)
    states = [
        grown(line, ["a", "b", "c"], [1, 2, 3, 4], tools=[GREP], template_kwargs={"x": 1}),
        grown(line, ["a", "B"], [1, 9], tools=[GREP]),
        grown(line, ["z"], [5, 6, 7, 8, 9]),
        grown(line, ["z"], []),
        grown(line, ["y#1", "x"], [5]),
        grown(line, ["y#2", "x", "w"], [5, 6]),
    ]
    for count in range(1, len(states) + 1):
        directory = home.with_name(f"turns-{count}")
        saved(directory, states[:count])
        (row,) = lines_of(loaded(directory)[0])
        assert alike(row, states[count - 1]), count


def test_of_a_line_with_a_hole_what_was_before_it_stays_until_it_is_written_whole(
    home: Path,
) -> None:
    line = Line(1, 0.0)
    entries = list(line_entries(line, 6))
    archive = SessionArchive(home, lambda: ())
    ends = []
    for entry in entries[:5]:
        archive.add(entry)
        archive.journal.flush(WAIT_S)
        ends.append(the_file(home).stat().st_size)
    archive.journal.close()
    octets = bytearray(the_file(home).read_bytes())
    octets[ends[2] + 50] ^= 4  # in the fourth
    the_file(home).write_bytes(octets)
    memory, counts = loaded(home)
    (row,) = lines_of(memory)
    assert row.line is not None and entries[2].line is not None
    assert row.line.tokens.tolist() == entries[2].line.tokens.tolist()
    assert (row.line.turns, row.at) == (3, 102.0)
    assert counts == {"damaged": 1, "lines_broken": 1}
    saved(home, entries[5:])  # another writer, which does not rely on what it did not write
    memory, _ = loaded(home)
    (row,) = lines_of(memory)
    assert alike(row, entries[5])


def test_what_did_not_reach_the_disk_is_not_built_upon(home: Path) -> None:
    line = Line(1, 0.0)
    entries = list(line_entries(line, 4))
    pages = SessionArchive(None, lambda: ())
    rows = [pages.record(entry)["line"] for entry in entries[:2]]
    assert [row["is_more"] for row in rows] == [False, True]
    pages.lost()
    assert not pages.record(entries[2])["line"]["is_more"]
    assert pages.record(entries[3])["line"]["is_more"]
    skipped = list(line_entries(line, 2, start=4))[1]
    assert not pages.record(skipped)["line"]["is_more"], "the one before was dropped"


def test_a_record_that_is_none_is_counted_and_costs_nothing_else(home: Path) -> None:
    other = journal.Journal(home, module.SCHEMA)
    rows: list[Any] = [
        *(7, [], {}, {"at": None}, {"at": 1.0, "turn": [1]}, {"at": 1.0, "thinking": 3}),
        {"at": 1.0, "session": ["k"]},
        {"at": 1.0, "session": ["k", "s", "a", "p", "loaded"]},
        {"at": 1.0, "session": ["k", "s", "a", "p", {}], "line": {"uid": b"x"}},
    ]
    other.append([other.packed(row) for row in rows])
    other.close()
    saved(home, [ArchiveEntry(1.0, turn=turn(1))])
    memory, counts = loaded(home)
    assert len(turns_of(memory)) == 1 and counts == {"records_odd": len(rows)}


def test_what_several_workers_remember_of_one_line_is_told_apart_by_where_it_stands(
    home: Path,
) -> None:
    line, fork = Line(1, 0.0), Line(1, 0.0)
    fork.uid = line.uid
    first, second = line_entries(line, 2)
    one, two, three = (SessionArchive(home, lambda: ()) for _ in range(3))
    one.add(first)
    one.add(second)
    for _ in line_entries(fork, 1):
        pass
    two.add(replace(first, at=50.0))  # as it was
    three.add(grown(fork, ["m0", "other"], range(5), at=130.0))
    for archive in (one, two, three):
        archive.journal.close()
    memory, _ = loaded(home)
    lines = [row.line for row in memory if row.line is not None]
    assert [(each.turns, len(each.shape.names)) for each in lines] == [(2, 2), (2, 2)]
    assert lines[0].uid != lines[1].uid

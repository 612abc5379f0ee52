"""A journal and its writer: who writes where, what comes back, what is made anew."""

import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.shared import durable_journal as journals
from hearth.shared.durable_journal import (
    SECRET_NAME,
    STALE_S,
    Journal,
    NullJournalWriter,
    remove_stale,
)
from tests.helpers.records.journal_records import SCHEMA, WAIT_S, Notes, held, opened, put, wrote

# ---------------------------------------------------------------- what comes back


def test_what_was_put_comes_back_in_order_over_several_lives(home: Path) -> None:
    wrote(home, "a", {"b": [1, 2.5, None, True]})
    assert wrote(home, b"c")["written"] == 1
    assert held(home) == ["a", {"b": [1, 2.5, None, True]}, b"c"]
    assert len(list(home.glob("*.journal"))) == 1, "the next one goes on with the file of the dead"


def test_integers_and_characters_that_json_can_hold_come_back(home: Path) -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    odd = [1 << 64, -(1 << 5_000), "half \ud83d", "\x00", 1e400, deep]
    wrote(home, odd)
    assert held(home) == [odd]


def test_what_is_nested_too_deep_is_counted_and_costs_nothing_else(home: Path) -> None:
    deep: Any = []
    for _ in range(2_000):
        deep = [deep]
    notes = Notes()
    scribe, _ = opened(home.with_name("notes-1"), notes)
    scribe.put(deep, 1)
    scribe.close()
    assert notes.losses == 1, "nothing may refer to it"
    assert wrote(home, "a", deep, object(), "b")["unwritable"] == 2
    assert held(home) == ["a", "b"]


def test_directory_and_files_are_for_their_owner_alone(home: Path) -> None:
    umask = os.umask(0)
    try:
        wrote(home, "a")
    finally:
        os.umask(umask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (home.parent, home)}
    assert set(modes.values()) == {0o700}
    assert [stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()] == [0o600, 0o600]


def test_a_link_a_pipe_and_a_foreign_file_are_left_alone(home: Path, tmp_path: Path) -> None:
    wrote(home, "a")
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (home / "0.journal").symlink_to(target)
    os.mkfifo(home / "1.journal")
    (home / "readme").write_text("mine")
    assert wrote(home, "b")["opens_failed"] == 1
    assert held(home) == ["a", "b"]
    assert target.read_bytes() == b"precious"
    assert {"0.journal", "1.journal", "readme"} <= {path.name for path in home.iterdir()}


def test_a_secret_is_known_by_another_name_in_each_directory(home: Path, tmp_path: Path) -> None:
    names = []
    for directory in (home, home, tmp_path / "another-0"):
        scribe, _ = opened(directory)
        names.append(scribe.named("the key"))
        scribe.close()
    assert names[0] == names[1] != names[2]
    assert "the key" not in names and NullJournalWriter().named("the key") == "the key"


def test_a_torn_secret_is_made_anew_and_what_it_covered_is_a_counted_loss(home: Path) -> None:
    wrote(home, "a")
    (home / SECRET_NAME).write_bytes(b"short")
    notes = Notes()
    scribe, notes.kept = opened(home, notes)
    notes.kept.append("b")
    put(scribe, "b")
    scribe.close()
    assert scribe.report() == {"damaged": 1, "written": 1, "rewritten": 1}
    assert held(home) == ["b"]
    assert (home / SECRET_NAME).stat().st_size == journals.SECRET_BYTES


@pytest.mark.parametrize("size", [10, 1 << 20, 3 << 20])
def test_a_damaged_record_of_any_size_costs_itself_alone(home: Path, size: int) -> None:
    assert wrote(home, "a", "b" * size, "c") == {"written": 3}
    path = next(home.glob("*.journal"))
    octets = bytearray(path.read_bytes())
    octets[octets.find(b"bb")] ^= 1
    path.write_bytes(octets)
    assert held(home) == ["a", "c"]


# ---------------------------------------------------------------- schemas


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
def test_a_record_of_another_schema_is_counted(
    home: Path, schema: int, caplog: pytest.LogCaptureFixture
) -> None:
    other = Journal(home, schema)
    other.append([other.packed("x")] * 3)
    other.close()
    scribe, records = opened(home)
    assert records == [] and scribe.report() == {"other_schema": 3}
    scribe.close()
    assert len(caplog.records) == 1, "one warning"


# ---------------------------------------------------------------- several writers


def test_each_living_writer_has_its_own_file_and_reads_all(home: Path) -> None:
    one, _ = opened(home)
    put(one, "a")
    two, records = opened(home)
    assert records == ["a"]
    two.put("b", 1)
    one.put("c", 1)
    assert two.flush(WAIT_S) and one.flush(WAIT_S)
    three, records = opened(home)
    assert sorted(records) == ["a", "b", "c"]
    assert len(list(home.glob("*.journal"))) == 2
    for scribe in (one, two, three):
        scribe.close()


def test_the_files_of_the_dead_become_one_once_something_is_put(home: Path) -> None:
    writers = [opened(home)[0] for _ in range(3)]
    for number, scribe in enumerate(writers):
        scribe.put(number, 1)
        scribe.close()
    assert len(list(home.glob("*.journal"))) == 3
    notes = Notes()
    scribe, notes.kept = opened(home, notes)
    assert sorted(notes.kept) == [0, 1, 2]
    assert len(list(home.glob("*.journal"))) == 3, "reading alone writes nothing"
    notes.kept.append("new")
    put(scribe, "new")
    scribe.close()
    assert len(list(home.glob("*.journal"))) == 1
    assert held(home) == notes.kept


def test_a_writer_amid_a_record_is_not_damaged(home: Path) -> None:
    living = Journal(home, SCHEMA)
    frame = living.packed("whole")
    living.append([frame])
    (path,) = home.glob("*.journal")
    with path.open("ab") as file:
        file.write(frame[:-1])
    reader = Journal(home, SCHEMA)
    assert [record for _, record in reader.read()] == ["whole"]
    assert not reader.counts
    living.close()
    reader.close()
    heir = Journal(home, SCHEMA)
    assert [record for _, record in heir.read()] == ["whole"]
    assert heir.counts == {"damaged": 1}, "of the dead it is"
    heir.close()


# ---------------------------------------------------------------- made anew


@pytest.mark.usefixtures("is_eager")
def test_a_file_never_grows_far_beyond_twice_what_is_alive(home: Path) -> None:
    notes = Notes()
    scribe, _ = opened(home, notes)
    sizes = []
    for number in range(400):
        notes.kept = [*notes.kept[-9:], number]
        put(scribe, number)
        sizes.append(sum(path.stat().st_size for path in home.glob("*.journal")))
    scribe.close()
    frame = 35
    assert max(sizes) <= 2 * 13 * frame, max(sizes)
    assert 20 < scribe.report()["rewritten"] < 100, "not at every record"
    records = held(home)
    assert records[-10:] == notes.kept
    assert len(records) < 40


@pytest.mark.usefixtures("is_eager")
def test_what_is_put_while_all_is_written_anew_is_in_both_files(home: Path) -> None:
    notes = Notes()
    scribe, _ = opened(home, notes)
    during: list[Any] = []

    def everything() -> Iterable[Any]:
        yield "old"
        scribe.put("meanwhile", 1)
        yield "older"
        (path,) = home.glob("*.journal")
        during.append(b"meanwhile" in path.read_bytes())

    notes.everything = everything
    put(scribe, "x" * 500, renews=True)
    notes.everything = Notes().everything
    scribe.close()
    assert during == [True]
    assert held(home) == ["old", "older", "meanwhile"]


def test_what_is_taken_back_leaves_the_disk(home: Path) -> None:
    notes = Notes()
    scribe, _ = opened(home, notes)
    put(scribe, "a secret")
    assert b"a secret" in next(home.glob("*.journal")).read_bytes()
    put(scribe, "it is gone", renews=True)
    assert b"a secret" not in next(home.glob("*.journal")).read_bytes()
    scribe.close()


# ---------------------------------------------------------------- other models


def test_journals_that_nobody_wrote_to_for_a_month_go_and_nothing_else(tmp_path: Path) -> None:
    now = time.time()
    for name in ("notes-ours", "notes-old", "notes-new", "notes-mixed", "others-old"):
        wrote(tmp_path / name, "a")
    (tmp_path / "notes-mixed" / "mine").write_text("x")
    for name in ("notes-ours", "notes-old", "notes-mixed", "others-old"):
        for path in (*(tmp_path / name).iterdir(), tmp_path / name):
            os.utime(path, (now - STALE_S - 1, now - STALE_S - 1))
    remove_stale(tmp_path / "notes-ours", "notes-", now)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"notes-ours", "notes-new", "notes-mixed", "others-old"}
    assert [path.name for path in (tmp_path / "notes-mixed").iterdir()] == ["mine"]
    assert held(tmp_path / "notes-ours") == ["a"]


def test_what_a_dead_writer_left_half_made_goes_and_a_living_ones_stays(home: Path) -> None:
    living = Journal(home, SCHEMA)
    left = home / ".writing-dead"
    left.write_bytes(b"half")
    seen: list[list[str]] = []

    def frames() -> Iterator[bytes]:
        yield living.packed("a")
        Journal(home, SCHEMA).close()
        seen.append([path.name for path in home.glob(".writing-*")])

    living.rewrite(frames())
    living.close()
    assert len(seen[0]) == 1 and not left.exists()
    assert held(home) == ["a"]


@pytest.mark.usefixtures("is_eager")
def test_what_was_alive_is_known_in_the_next_life(home: Path) -> None:
    notes = Notes()
    notes.kept = list(range(20))
    scribe, _ = opened(home, notes)
    for number in range(20):
        scribe.put(number, 1)
    assert scribe.flush(WAIT_S)
    scribe.close()
    assert next(home.glob("*.journal")).stat().st_size > 2 * journals.REWRITE_BYTES_MIN
    again = Journal(home, SCHEMA)
    assert again.is_rewrite_due, "before it is read"
    assert len(list(again.read())) == 20
    assert not again.is_rewrite_due
    again.close()

"""Suspects are kept for a day or until an upgrade, and what a killed worker left is read."""

import dataclasses
import logging
import os
from pathlib import Path

import orjson
import pytest

from hearth.shared import suspects as module
from hearth.shared.errors import WorkerLost
from hearth.shared.suspects import (
    SUSPECTED_S,
    SUSPECTS_MAX,
    Suspect,
    SuspectStore,
    running_path,
    take_running,
)

NOW = 1_700_000_000.0
POISON = Suspect("p" * 32, "o" * 32, "read", 512, 700)
WRITING = Suspect("w" * 32, "o" * 32, "answer", 300, 340)


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


def store_in(path: Path, clock: Clock | None = None) -> SuspectStore:
    return SuspectStore(path / "suspects", clock or Clock())


def alone(row: Suspect) -> Suspect:
    return dataclasses.replace(row, is_alone=True)


def test_who_dies_in_company_is_never_refused(tmp_path: Path) -> None:
    """However often: whose forward it was nobody knows."""
    store = store_in(tmp_path)
    for _ in range(5):
        found = store.record_death({"p": POISON, "w": WRITING}, "SIGKILL")
        assert set(found) == {"p", "w"} and not any(row.is_refused for row in found.values())
    assert set(store.all()) == {POISON.name, WRITING.name}
    error = found["w"].error("It died.")
    assert isinstance(error, WorkerLost) and "It died. It ran then: it is retried" in str(error)


@pytest.mark.parametrize(
    ("row", "where"), [(POISON, "its first 512 tokens were read"), (WRITING, "it was answered")]
)
def test_the_second_death_is_a_400_that_says_it_all(
    tmp_path: Path, row: Suspect, where: str
) -> None:
    store = store_in(tmp_path)
    store.record_death({"p": row}, "SIGSEGV")
    error = store.record_death({"p": alone(row)}, "SIGSEGV")["p"].error("It died.")
    assert (error.status, error.code) == (400, "prompt_refused")
    for part in ("twice", "SIGSEGV", where, "2023-11-15 22:13 UTC", "DELETE /v1/cache"):
        assert part in str(error)
    beside = store.record_death({"p": row}, "SIGSEGV")["p"]
    assert beside.is_refused, "by another worker, which had it already"


def test_an_end_that_proves_nothing_refuses_nobody(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for _ in range(3):
        found = store.record_death({"p": alone(POISON)}, "SIGKILL: it was silent", is_proof=False)
        assert not found["p"].is_refused
    assert store.record_death({"p": alone(POISON)}, "SIGSEGV")["p"].is_refused


def test_a_refusal_outlives_the_process_and_ends_with_the_day(tmp_path: Path) -> None:
    store_in(tmp_path).record_death({"p": alone(POISON)}, "SIGSEGV")
    clock = Clock()
    store = store_in(tmp_path, clock)
    assert store.all()[POISON.name].is_refused
    clock.now += SUSPECTED_S - 1
    assert store.all()
    clock.now += 2
    assert not store.all() and not list((tmp_path / "suspects").glob("*.suspect"))


def test_a_clock_that_is_set_back_makes_no_refusal_eternal(tmp_path: Path) -> None:
    clock = Clock()
    store = store_in(tmp_path, clock)
    store.record_death({"p": POISON}, "SIGSEGV")
    clock.now -= 700 * SUSPECTED_S
    assert not store.all()


def test_an_upgrade_lifts_what_was_suspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_in(tmp_path).record_death({"p": POISON}, "SIGSEGV")
    monkeypatch.setattr(module, "VERSION", "9.9.9")
    assert not store_in(tmp_path).all()


def test_names_are_made_with_a_secret_of_this_directory(tmp_path: Path) -> None:
    one, same, other = store_in(tmp_path), store_in(tmp_path), store_in(tmp_path / "other")
    assert one.secret == same.secret != other.secret and len(one.secret) == 32


def test_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store_in(tmp_path).record_death({"p": POISON}, "SIGSEGV")
    finally:
        os.umask(before)
    assert (tmp_path / "suspects").stat().st_mode & 0o777 == 0o700
    files = list((tmp_path / "suspects").iterdir())
    assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[" * 3000, '{"name": 1}']
    + [
        orjson.dumps(dataclasses.asdict(POISON) | {"deaths": 1, "died_at": NOW} | change).decode()
        for change in (
            *({"length": -1}, {"length": "x"}, {"tokens": 3}, {"deaths": 0}, {"deaths": "x"}),
            *({"died_at": "today"}, {"name": "ab"}, {"more": 1}),
        )
    ],
)
def test_what_is_no_suspect_is_removed_and_suspects_nobody(tmp_path: Path, text: str) -> None:
    store = store_in(tmp_path)
    path = tmp_path / "suspects" / f"{POISON.name}.suspect"
    path.write_text(text)
    assert not store.all() and not path.exists()


def test_of_too_many_the_oldest_go(tmp_path: Path) -> None:
    clock = Clock()
    store = store_in(tmp_path, clock)
    for number in range(3):
        clock.now = NOW + number
        store.record_death({"": dataclasses.replace(POISON, name=f"{number}")}, "SIGKILL")
    clock.now += 1
    rows = {str(n): dataclasses.replace(POISON, name=f"new-{n}") for n in range(SUSPECTS_MAX - 1)}
    store.record_death(rows, "SIGKILL")
    kept = store.all()
    assert len(kept) == SUSPECTS_MAX and "0" not in kept and "1" not in kept and "2" in kept


@pytest.mark.parametrize("garbage", [b"", b"\xff\n", b"[1]\n", b'{"r": 1}\n', b'{"r": {"x": 1}}'])
def test_what_a_worker_left_half_written_names_nobody(tmp_path: Path, garbage: bytes) -> None:
    socket_path = tmp_path / "worker-0.sock"
    assert take_running(socket_path) == {}
    running_path(socket_path).write_bytes(garbage)
    assert take_running(socket_path) == {}
    running_path(socket_path).write_bytes(orjson.dumps({"r": POISON}) + b"\n" + garbage)
    assert take_running(socket_path) == {"r": POISON}
    assert take_running(socket_path) == {}, "once a process"


def test_a_directory_of_no_use_is_told_and_suspects_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "suspects").write_text("a file")
    with caplog.at_level(logging.WARNING):
        store = store_in(tmp_path)
        assert store.record_death({"p": alone(POISON)}, "SIGSEGV")["p"].is_refused
    assert not store.all() and "cannot be remembered" in caplog.text
    assert "cannot be kept" in caplog.text

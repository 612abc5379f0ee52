"""Suspicions are kept for a day or until an upgrade, and name neither key nor text."""

import dataclasses
import json
import logging
import os
from pathlib import Path

import pytest

from hearth.shared.suspects import suspect_store as module
from hearth.shared.suspects.suspect_store import (
    SUSPECTED_S,
    SUSPECTS_MAX,
    SuspectStore,
    Suspicion,
    open_store,
)

NOW = 1_700_000_000.0


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


def store_in(path: Path, clock: Clock | None = None) -> SuspectStore:
    return SuspectStore(path / "suspects", clock or Clock())


def suspicion(name: bytes = b"n" * 16, **fields: object) -> Suspicion:
    row = Suspicion(name.hex(), "aa" * 16, "prefill", 256, 256, 1, 0, NOW, "SIGSEGV", False)
    return dataclasses.replace(row, **fields)  # type: ignore[arg-type]


def test_a_suspicion_outlives_the_process_and_ends_with_the_day(tmp_path: Path) -> None:
    clock = Clock()
    store_in(tmp_path).save(suspicion())
    store = store_in(tmp_path, clock)
    assert store.all() == {suspicion().name: suspicion()}
    clock.now += SUSPECTED_S - 1
    assert store.all()
    clock.now += 2
    assert not store.all() and not list((tmp_path / "suspects").glob("*.suspect"))


def test_a_clock_that_is_set_back_makes_no_refusal_eternal(tmp_path: Path) -> None:
    clock = Clock()
    store = store_in(tmp_path, clock)
    store.save(suspicion(is_refused=True))
    clock.now -= 700 * SUSPECTED_S
    assert not store.all()


def test_an_upgrade_lifts_what_was_suspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    name = store.named(b"tokens")
    store.save(suspicion(name, is_refused=True))
    monkeypatch.setattr(module, "VERSION", "9.9.9")
    assert store.named(b"tokens") != name
    assert not store.all()


def test_names_are_of_this_directory_alone(tmp_path: Path) -> None:
    """Who reads one directory can look for no key's digest and no prompt's hash in it."""
    one, same, other = store_in(tmp_path), store_in(tmp_path), store_in(tmp_path / "other")
    assert one.named(b"key") == same.named(b"key") != other.named(b"key")
    assert one.named(b"key") != one.named(b"key", "owner")
    shorter = SuspectStore(tmp_path / "suspects", cut_label="256")
    assert shorter.named(b"key") != one.named(b"key"), "other forwards may not end a worker"


def test_files_are_private(tmp_path: Path) -> None:
    os.umask(os.umask(0))
    store_in(tmp_path).save(suspicion())
    assert (tmp_path / "suspects").stat().st_mode & 0o777 == 0o700
    files = list((tmp_path / "suspects").iterdir())
    assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[" * 3000,
        '{"name": 1}',
        *(
            json.dumps(dataclasses.asdict(suspicion()) | change)
            for change in (
                {"length": -1},
                {"length": True},
                {"tokens": 3},
                {"kind": "poison"},
                {"died_at": float("nan")},
                {"died_at": "today"},
                {"name": "ab"},
                {"more": 1},
                {"is_refused": 1},
            )
        ),
    ],
)
def test_what_is_no_suspicion_is_removed_and_suspects_nobody(tmp_path: Path, text: str) -> None:
    store = store_in(tmp_path)
    path = tmp_path / "suspects" / f"{suspicion().name}.suspect"
    path.write_text(text)
    assert not store.all() and not path.exists()


def test_served_and_cleared_suspicions_are_gone_for_every_process(tmp_path: Path) -> None:
    one, other = store_in(tmp_path), store_in(tmp_path)
    mine, theirs = suspicion(), suspicion(b"m" * 16, owner="bb" * 16)
    one.save(mine)
    one.save(theirs)
    other.drop(mine)
    assert not one.holds(mine) and one.holds(theirs)
    one.save(mine)
    assert other.clear(theirs.owner) == 1 and set(one.all()) == {mine.name}
    assert other.clear() == 1 and not one.all()


def test_of_too_many_the_oldest_go(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for number in range(SUSPECTS_MAX + 3):
        row = suspicion(number.to_bytes(16), died_at=NOW - SUSPECTS_MAX + number)
        (tmp_path / "suspects" / f"{row.name}.suspect").write_text(
            json.dumps(dataclasses.asdict(row))
        )
    store.save(suspicion(died_at=NOW))
    kept = store.all()
    assert len(kept) == SUSPECTS_MAX and (0).to_bytes(16).hex() not in kept
    assert suspicion().name in kept


def test_a_directory_of_no_use_is_told_and_suspects_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "suspects").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert open_store(tmp_path) is None
    assert "cannot be remembered" in caplog.text


def test_a_secret_that_is_half_written_is_made_anew(tmp_path: Path) -> None:
    store_in(tmp_path).named(b"x")
    (tmp_path / "suspects" / ".secret").write_bytes(b"half")
    assert store_in(tmp_path).named(b"x") == store_in(tmp_path).named(b"x")

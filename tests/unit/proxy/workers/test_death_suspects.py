"""Suspects of a worker's death are those in its forward; the second alone is refused."""

import dataclasses
from pathlib import Path

from hearth.proxy.workers.death_suspects import DeathSuspects, error_of
from hearth.shared.errors import WorkerLost
from hearth.shared.suspects.forward_record import NO_NAME, ForwardRow
from hearth.shared.suspects.suspect_store import SuspectStore, Suspicion

POISON = ForwardRow("p", b"p" * 16, b"o" * 16, 512, 512, "prefill")
WRITING = ForwardRow("w", b"w" * 16, b"o" * 16, 300, 340, "decode")


def suspects_in(path: Path) -> tuple[DeathSuspects, SuspectStore]:
    store = SuspectStore(path / "suspects")
    return DeathSuspects(store), store


def retried(row: ForwardRow, of: Suspicion, **fields: object) -> ForwardRow:
    """Return the row of a suspect that runs alone."""
    alone = dataclasses.replace(row, is_alone=True, suspect=bytes.fromhex(of.name))
    return dataclasses.replace(alone, **fields)  # type: ignore[arg-type]


def test_one_death_suspects_all_in_the_forward_and_refuses_nobody(tmp_path: Path) -> None:
    suspects, store = suspects_in(tmp_path)
    found = suspects.note([POISON, WRITING], "SIGABRT")
    assert set(found) == {"p", "w"} and not any(row.is_refused for row in found.values())
    assert set(store.all()) == {POISON.name.hex(), WRITING.name.hex()}
    assert found["w"].tokens == 340 and found["w"].length == 300


def test_the_second_death_alone_at_the_same_place_is_refused(tmp_path: Path) -> None:
    suspects, _ = suspects_in(tmp_path)
    first = suspects.note([POISON], "SIGSEGV")["p"]
    second = suspects.note([retried(POISON, first)], "SIGSEGV")["p"]
    assert second.is_refused and (second.deaths, second.lone_deaths) == (2, 1)
    error = error_of(second, "It died.")
    assert (error.status, error.code) == (400, "prompt_refused")
    for part in ("2 times", "SIGSEGV", "first 512 tokens", "UTC", "DELETE /v1/cache"):
        assert part in str(error)


def test_one_that_was_served_in_small_forwards_and_dies_in_whole_ones_needs_small_ones(
    tmp_path: Path,
) -> None:
    suspects, store = suspects_in(tmp_path)
    first = suspects.note([POISON], "SIGKILL")["p"]
    store.save(dataclasses.replace(first, stage="trial"))
    second = suspects.note([retried(POISON, first)], "SIGKILL")["p"]
    assert (second.stage, second.is_refused, second.deaths) == ("small", False, 2)
    third = suspects.note([retried(POISON, second)], "SIGKILL")["p"]
    assert third.is_refused, "small ones did not help"


def test_who_dies_in_company_is_never_refused(tmp_path: Path) -> None:
    """However often: whose forward it was nobody knows."""
    suspects, _ = suspects_in(tmp_path)
    for deaths in range(1, 6):
        found = suspects.note([POISON, WRITING], "SIGKILL")
        assert [row.deaths for row in found.values()] == [deaths] * 2
    assert not any(row.is_refused for row in found.values())
    error = error_of(found["w"], "It died.")
    assert isinstance(error, WorkerLost) and "retried alone" in str(error)


def test_a_silent_worker_proves_nothing(tmp_path: Path) -> None:
    suspects, _ = suspects_in(tmp_path)
    first = suspects.note([POISON], "SIGKILL: it was silent", is_proof=False)["p"]
    again = suspects.note([retried(POISON, first)], "SIGKILL: it was silent", is_proof=False)["p"]
    assert not again.is_refused and again.lone_deaths == 0
    assert suspects.note([retried(POISON, first)], "SIGSEGV")["p"].is_refused


def test_two_random_kills_at_two_places_refuse_nobody_a_third_alone_does(tmp_path: Path) -> None:
    suspects, _ = suspects_in(tmp_path)
    first = suspects.note([POISON], "SIGKILL")["p"]
    further = retried(POISON, first, name=b"q" * 16, length=768, tokens=768)
    second = suspects.note([further], "SIGKILL")["p"]
    assert not second.is_refused and second.lone_deaths == 1
    third = suspects.note([retried(further, second, name=b"r" * 16, length=900)], "SIGKILL")["p"]
    assert third.is_refused and third.length == 900


def test_answers_that_broke_off_far_apart_are_two_places(tmp_path: Path) -> None:
    suspects, _ = suspects_in(tmp_path)
    first = suspects.note([WRITING], "SIGKILL")["w"]
    assert not suspects.note([retried(WRITING, first, tokens=900)], "SIGKILL")["w"].is_refused
    suspects, _ = suspects_in(tmp_path / "near")
    first = suspects.note([WRITING], "SIGKILL")["w"]
    assert suspects.note([retried(WRITING, first, tokens=350)], "SIGKILL")["w"].is_refused


def test_a_shared_beginning_is_not_refused_for_what_came_behind_it(tmp_path: Path) -> None:
    """A suspect that dies earlier at its last retry: its longer tokens are refused, no trunk."""
    suspects, _ = suspects_in(tmp_path)
    first = suspects.note([POISON], "SIGKILL")["p"]
    trunk = retried(POISON, first, name=b"t" * 16, length=64, tokens=64)
    second = suspects.note([trunk], "SIGKILL")["p"]
    third = suspects.note([retried(trunk, first)], "SIGKILL")["p"]
    assert not second.is_refused and third.is_refused
    assert (third.name, third.length) == (first.name, 512)


def test_idle_work_is_suspected_and_never_refused(tmp_path: Path) -> None:
    suspects, store = suspects_in(tmp_path)
    idle = ForwardRow("", b"i" * 16, NO_NAME, 256, 256, "idle")
    for _ in range(3):
        assert not suspects.note([idle], "SIGABRT")[""].is_refused
    assert store.all()[idle.name.hex()].kind == "idle"


def test_without_a_store_nobody_is_suspected() -> None:
    assert DeathSuspects().note([POISON], "SIGSEGV") == {}

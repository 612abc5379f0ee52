"""Checks when `caffeinate` runs: one that is not the system's, and that notes what it is told."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from hearth.proxy.workers import keep_awake
from hearth.proxy.workers.keep_awake import KeepAwake
from tests.helpers.proxy.fake_worker_pool import until

pytestmark = pytest.mark.process

FAKE = """#!/bin/sh
echo "$$ $*" >> "{notes}"
exec {body}
"""


class Notes:
    """What the `caffeinate` on PATH has noted."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "notes"
        self.path.touch()
        self.program = directory / "bin" / "caffeinate"
        self.program.parent.mkdir()
        self.write("sleep 1000")

    def write(self, body: str) -> None:
        self.program.write_text(FAKE.format(notes=self.path, body=body))
        self.program.chmod(0o755)

    def starts(self) -> list[list[str]]:
        return [row.split() for row in self.path.read_text().splitlines()]

    def running(self) -> list[int]:
        """Return which are alive or were not waited for."""
        return [int(row[0]) for row in self.starts() if psutil.pid_exists(int(row[0]))]


def has_ended(pid: int) -> bool:
    """Whether a child has ended that was not waited for."""
    return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notes:
    made = Notes(tmp_path)
    monkeypatch.setenv("PATH", f"{made.program.parent}:{os.environ['PATH']}")
    return made


async def test_one_runs_while_any_request_is_open_and_ends_with_the_last(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_awake, "GRACE_S", 0.0)

    awake = KeepAwake("darwin")
    with awake.request():
        await until(notes.starts)
        with awake.request():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.02)
        assert len(notes.running()) == 1
    await until(lambda: not notes.running())
    with awake.request():
        await until(lambda: len(notes.starts()) == 2)
    await until(lambda: not notes.running())
    assert [row[1:] for row in notes.starts()] == [["-i", "-w", str(os.getpid())]] * 2


async def test_between_two_requests_of_an_agent_it_stays(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    awake = KeepAwake("darwin")
    for _ in range(3):
        with awake.request():
            await until(notes.starts)
        await asyncio.sleep(0.01)
    assert len(notes.starts()) == len(notes.running()) == 1
    monkeypatch.setattr(keep_awake, "GRACE_S", 0.2)
    with awake.request():
        pass
    with awake.request():  # within the grace of the one before
        await asyncio.sleep(0.4)
        assert len(notes.starts()) == len(notes.running()) == 1
    await until(lambda: not notes.running())


@pytest.mark.parametrize("fault", ["missing", "not a program", "ends at once"])
async def test_one_that_does_not_run_is_told_once_and_tried_again(
    fault: str, notes: Notes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "missing":
        monkeypatch.setenv("PATH", str(notes.path.parent / "nowhere"))
    elif fault == "not a program":
        notes.program.write_bytes(b"\x00\x01")
        monkeypatch.setenv("PATH", str(notes.program.parent))
    else:
        notes.write("false")

    awake = KeepAwake("darwin")
    for number in range(1, 4):
        with awake.request():
            if fault == "ends at once":
                await until(lambda: len(notes.starts()) == number)  # noqa: B023
                await until(lambda: has_ended(notes.running()[-1]))
    awake.close()
    assert not notes.running()
    (told,) = caplog.messages
    assert told.startswith("caffeinate ") and "pmset" in told


@pytest.mark.parametrize(("system", "starts"), [("darwin", 1), ("linux", 0)])
async def test_it_ends_with_the_server_and_never_begins_where_it_is_no_mac(
    system: str, starts: int, notes: Notes
) -> None:
    awake = KeepAwake(system)
    with awake.request():
        await asyncio.sleep(0.05)
        await until(lambda: len(notes.starts()) >= starts)
    awake.close()
    with awake.request():
        await asyncio.sleep(0.02)
    assert (len(notes.starts()), notes.running()) == (starts, [])

"""Processes of a server are counted with all that they took, those that have ended too."""

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil
import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.process_measures import (
    ProcessLedger,
    ProcessReading,
    memory_bytes,
    parsed_io,
    parsed_rollup,
    parsed_stat,
    read_process,
    reading_of,
)

ROOT_PID = 10


@dataclass
class Machine:
    """Processes as the kernel counts them. A process that nobody waits for may stay listed."""

    table: dict[int, ProcessReading]
    adds_written: bool
    truth_s: float = 0.0  # of CPU, used by any process, ever
    truth_bytes: int = 0
    starts: int = 0
    unseen_s: float = 0.0  # used since the last look: what ends unwaited-for takes it along

    @classmethod
    def started(cls, adds_written: bool = True) -> "Machine":
        return cls({ROOT_PID: ProcessReading(0, 1, 3.0, 2.0, 5, adds_written)}, adds_written)

    def spawn(self, parent: int) -> int:
        """Start a process; its number may be that of an ended one."""
        pid = max(self.table) + 1
        self.starts += 1
        self.table[pid] = ProcessReading(self.starts, parent, 0.0, 0.0, 0, self.adds_written)
        return pid

    def work(self, pid: int, cpu_s: float, written: int) -> None:
        old = self.table[pid]
        self.table[pid] = replace(
            old, cpu_s=old.cpu_s + cpu_s, written_bytes=(old.written_bytes or 0) + written
        )
        self.truth_s += cpu_s
        self.truth_bytes += written
        self.unseen_s += cpu_s

    def end(self, pid: int, is_waited: bool) -> None:
        """End a process and all below it, the lowest first."""
        for child in [each for each, row in self.table.items() if row.parent == pid]:
            self.end(child, is_waited)
        ended = self.table.pop(pid)
        if is_waited and ended.parent in self.table:
            self._wait(ended)

    def _wait(self, ended: ProcessReading) -> None:
        parent = self.table[ended.parent]
        more = ended.cpu_s + ended.waited_cpu_s
        written = (parent.written_bytes or 0) + (ended.written_bytes or 0) * self.adds_written
        self.table[ended.parent] = replace(
            parent, waited_cpu_s=parent.waited_cpu_s + more, written_bytes=written
        )

    def ledger(self) -> ProcessLedger:
        return ProcessLedger(lambda: list(self.table), self.table.get)


def lives(machine: Machine, chance: random.Random, is_waited: bool) -> Iterator[None]:
    """Let the machine do something at random, for each look."""
    for _ in range(chance.randrange(1, 8)):
        for _ in range(chance.randrange(6)):
            pid = chance.choice(list(machine.table))
            match chance.randrange(3):
                case 0:
                    machine.spawn(pid)
                case 1:
                    machine.work(pid, chance.choice((0.01, 0.5, 2.0)), chance.randrange(1_000))
                case 2 if pid != ROOT_PID:
                    machine.end(pid, is_waited)
        yield


@given(st.integers(0, 1 << 32))
def test_what_parents_wait_for_is_counted_whole(seed: int) -> None:
    """Also what begins and ends between two looks."""
    machine = Machine.started()
    ledger = machine.ledger()
    for _ in lives(machine, random.Random(seed), is_waited=True):
        totals = ledger.look()
        assert totals.cpu_s == pytest.approx(machine.truth_s)
        assert totals.written_bytes == machine.truth_bytes


@given(st.integers(0, 1 << 32), st.booleans())
def test_what_nobody_waits_for_keeps_what_was_seen_of_it(seed: int, adds_written: bool) -> None:
    machine = Machine.started(adds_written)
    ledger = machine.ledger()
    seen = 0.0
    for _ in lives(machine, random.Random(seed), is_waited=False):
        totals = ledger.look()
        assert seen - 1e-9 <= totals.cpu_s <= machine.truth_s + 1e-9
        assert 0 <= totals.written_bytes <= machine.truth_bytes
        assert totals.cpu_s >= machine.truth_s - machine.unseen_s - 1e-9
        seen, machine.unseen_s = totals.cpu_s, machine.truth_s - totals.cpu_s


def test_what_the_system_does_not_add_to_the_parent_is_kept() -> None:
    machine = Machine.started(adds_written=False)
    ledger = machine.ledger()
    child = machine.spawn(ROOT_PID)
    machine.work(child, 1.0, 700)
    ledger.look()
    machine.end(child, is_waited=True)
    assert ledger.look().written_bytes == 700
    assert ledger.look().cpu_s == 1.0


def test_what_is_waited_for_late_counts_once() -> None:
    """macOS tells nothing of a process that has ended and waits for its parent."""
    machine = Machine.started()
    ledger = machine.ledger()
    child = machine.spawn(ROOT_PID)
    machine.work(child, 1.5, 0)
    ledger.look()
    zombie = machine.table.pop(child)
    assert ledger.look().cpu_s == 1.5
    machine.table[child] = zombie
    machine.end(child, is_waited=True)
    assert ledger.look().cpu_s == 1.5
    machine.end(ROOT_PID, is_waited=False)
    assert ledger.look().cpu_s == 1.5


def test_a_later_process_of_the_same_number_is_another() -> None:
    machine = Machine.started()
    ledger = machine.ledger()
    child = machine.spawn(ROOT_PID)
    machine.work(child, 4.0, 9)
    ledger.look()
    machine.end(child, is_waited=True)
    machine.table[child] = ProcessReading(99.0, ROOT_PID, 0.25, 0.0, 1, True)
    totals = ledger.look()
    assert (totals.cpu_s, totals.written_bytes) == (4.25, 10)


def test_a_zombie_keeps_what_it_wrote() -> None:
    machine = Machine.started()
    ledger = machine.ledger()
    child = machine.spawn(ROOT_PID)
    machine.work(child, 0.0, 40)
    ledger.look()
    machine.table[child] = replace(machine.table[child], written_bytes=None)
    assert ledger.look().written_bytes == 40


def test_no_processes_take_nothing() -> None:
    totals = ProcessLedger(list).look()
    assert (totals.cpu_s, totals.written_bytes) == (0, 0)
    assert memory_bytes([]) == 0


# ---------------------------------------------------------------- what systems say

STAT = (
    "4077 (a) b (c) S 4001 4077 4077 0 -1 4194560 8123 551 0 0 150 50 30 20 20 0 8 0 123456 "
    "1073741824 20000 18446744073709551615 1 1 0 0 0 0 0 16781312 17642 0 0 0 17 1 0 0 0 0 0"
)


def test_linux_tells_times_of_a_process_and_of_its_children() -> None:
    assert parsed_stat(STAT, 100) == (1234.56, 4001, 2.0, 0.5)
    with pytest.raises(ValueError):
        parsed_stat("1 (a) S 2", 100)


def test_linux_tells_what_was_written_and_not_deleted_before() -> None:
    text = "rchar: 5\nwchar: 6\nread_bytes: 7\nwrite_bytes: 8192\ncancelled_write_bytes: 4096\n"
    assert parsed_io(text) == 4_096


def test_linux_tells_shared_memory_in_parts() -> None:
    text = "5581-7fff ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\nPss: 300 kB\nPss_Anon: 9 kB\n"
    assert parsed_rollup(text) == 300 << 10


def test_macos_tells_times_in_ticks() -> None:
    """Words of rusage_info_v2 on Apple Silicon, where 24 ticks are a microsecond."""
    words = dict.fromkeys(range(20), 0) | {2: 36_000_000, 3: 12_000_000, 12: 24_000_000, 19: 77}
    found = reading_of(words, 125 / 3 / 1e9, started=5.0, parent=3)
    assert found == ProcessReading(
        5.0, 3, pytest.approx(2.0), pytest.approx(1.0), 77, adds_written=False
    )


@pytest.mark.process
def test_a_real_server_and_its_short_lived_children_are_counted(tmp_path: object) -> None:
    """Each process says itself what it used; the system counts in ticks of 10 ms."""
    work = "import time\nwhile time.process_time() < 0.15: pass\nprint(time.process_time())"
    parent = (
        "import subprocess, sys, time\n"
        f"run = lambda: subprocess.run([sys.executable, '-S', '-c', {work!r}], text=True,"
        " stdout=subprocess.PIPE).stdout\n"
        "input()\n"
        "spent = sum(float(run()) for _ in range(2))\n"
        f"open({str(tmp_path)!r} + '/file', 'wb').write(bytes(3_000_000))\n"
        "print(spent, time.process_time(), flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-S", "-c", parent]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as server:  # type: ignore[call-overload]
        root = psutil.Process(server.pid)
        ledger = ProcessLedger(
            lambda: [root.pid, *(each.pid for each in root.children(recursive=True))]
        )
        server.stdin.write("\n")
        server.stdin.flush()
        children_s, own_s = map(float, server.stdout.readline().split())
        totals = ledger.look()
        assert children_s - 0.05 <= totals.cpu_s <= children_s + own_s + 0.15
        assert memory_bytes([server.pid]) > 1e6
        server.stdin.write("\n")
        server.stdin.close()
        assert server.wait() == 0
    if sys.platform == "linux":
        assert totals.written_bytes in range(3_000_000, 3_200_000) or _is_in_memory(tmp_path)
    assert read_process(server.pid) is None
    assert memory_bytes([server.pid]) == 0


def _is_in_memory(place: object) -> bool:
    """Return whether what is written there goes to no disk."""
    disks = psutil.disk_partitions(all=True)
    found = max((d for d in disks if str(place).startswith(d.mountpoint)), key=lambda d: len(d[1]))
    return found.fstype in ("tmpfs", "ramfs")

"""Several processes write, read and sweep one directory at once, and some die amid it."""

import os
import random
import signal
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from hearth.worker.disk.file_format import Record, encode
from hearth.worker.disk.file_names import TEMP_PREFIX, parse
from hearth.worker.disk.file_store import FileStore
from tests.helpers.records.disk_records import OTHER_ROOT, ROOT, contents, record

pytestmark = pytest.mark.process

Start = Callable[[int], "subprocess.Popen[str]"]

REPOSITORY = Path(__file__).parents[4]
CAP = 3 << 20
RECORD_BYTES = 200_000
RUN_S = 4.0
BUSY_RUN_S = 40.0  # on a machine that has hardly any time for it


def piece(number: int, root_number: int) -> Record:
    root = (ROOT, OTHER_ROOT)[root_number]
    return record(number, RECORD_BYTES, root=root, is_canonical=number % 3 > 0)


def work(directory: str, seed: str, run_s: str) -> None:
    """Put, get and sweep at random; print the counts. Runs in a process of its own."""
    chance = random.Random(int(seed))
    root_number = int(seed) % 3 // 2
    file_store = FileStore(Path(directory), (ROOT, OTHER_ROOT)[root_number], CAP, 0)
    began = time.monotonic()

    def has_done_enough() -> bool:
        ran_s = time.monotonic() - began
        is_much = file_store.counts["writes"] > 10 and file_store.counts["reads"] > 5
        return ran_s > float(run_s) and (is_much or ran_s > BUSY_RUN_S)

    while not has_done_enough():
        one = piece(chance.randrange(24), root_number)
        if chance.random() < 0.5:
            file_store.put(one)
        elif chance.random() < 0.9:
            found = file_store.get(one.name)
            assert found is None or contents(found) == contents(one)
        else:
            file_store.sweep()
    print(dict(file_store.counts))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """What starts a process with a seed; all of them and their pipes end with the test."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['work'](*sys.argv[2:])"
    with ExitStack() as processes:

        def start_one(seed: int) -> "subprocess.Popen[str]":
            command = [sys.executable, "-c", code, __file__, str(tmp_path), str(seed), str(RUN_S)]
            process = subprocess.Popen(
                command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield start_one


def live_files(directory: Path) -> list[Path]:
    """Return the files below; one that goes meanwhile is left out, a directory too.

    ``Path.rglob`` raises where a directory goes, and a store removes another root's empty one.
    """
    return [Path(root, name) for root, _, names in os.walk(directory) for name in names]


def used(directory: Path) -> int:
    total = 0
    for path in live_files(directory):
        if path.suffix == ".safetensors":
            with suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


def test_neighbours_corrupt_nothing_raise_nothing_and_keep_the_cap_within_a_file(
    tmp_path: Path, start: Start
) -> None:
    workers = [start(seed) for seed in range(3)]  # 0 and 1 share a root
    doomed = start(9)
    file_bytes = sum(map(len, encode(piece(0, 0))))
    worst, killed = 0, 0
    while any(worker.poll() is None for worker in workers):
        worst = max(worst, used(tmp_path))
        if doomed.poll() is None and chance_to_die(tmp_path):
            os.kill(doomed.pid, signal.SIGKILL)
            doomed.communicate()
            killed += 1
            doomed = start(9 + killed)
        time.sleep(0.01)
    doomed.kill()
    doomed.communicate()
    outputs = [worker.communicate() for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), outputs
    assert worst <= CAP + file_bytes, worst
    assert killed, "some died amid a write"
    counts = [literal_eval(out) for out, _ in outputs]
    assert not [key for count in counts for key in count if key.startswith(("damaged", "ledgers"))]
    assert all(count["writes"] > 10 and count["reads"] > 5 for count in counts), counts
    assert sum(count["evictions"] for count in counts) > 10
    check_all(tmp_path)


def chance_to_die(directory: Path) -> bool:
    return any(path.name.startswith(TEMP_PREFIX) for path in live_files(directory))


def check_all(directory: Path) -> None:
    """Assert that every file is whole and what it should be, and nothing half done stays."""
    for number, root in enumerate((ROOT, OTHER_ROOT)):
        file_store = FileStore(directory, root, CAP, 0)
        file_store.sweep()
        known = {one.name: one for one in (piece(seed, number) for seed in range(24))}
        for path in (directory / root.hex()).glob("*"):  # gone where nothing of it was kept
            name = parse(path.name, "")
            assert name is not None, path
            found = file_store.get(name)
            assert found is not None and contents(found) == contents(known[name])

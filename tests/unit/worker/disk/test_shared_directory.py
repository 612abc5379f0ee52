"""Several workers write, read and sweep one directory at once; each has its own store and lock."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hearth.worker.disk.file_format import Record, encode, parse
from hearth.worker.disk.file_store import FILE_BYTES_MIN, FileStore
from tests.helpers.records.disk_records import OTHER_ROOT, ROOT, contents, record

ROOTS = (ROOT, ROOT, OTHER_ROOT)  # of the workers
RECORD_BYTES = 200_000
CAP = 10 * RECORD_BYTES
PIECES = 24
STEPS = 100


def piece(number: int, worker: int) -> Record:
    return record(number, RECORD_BYTES, root=ROOTS[worker], is_canonical=number % 3 > 0)


def work(directory: Path, worker: int) -> Counter[str]:
    """Put, get and sweep at random; return the counts."""
    chance, file_store = random.Random(worker), FileStore(directory, ROOTS[worker], CAP, 0)
    for _ in range(STEPS):
        one = piece(chance.randrange(PIECES), worker)
        what = chance.choices(["put", "get", "sweep"], [5, 4, 1])[0]
        if what == "put":
            file_store.put(one)
        elif what == "get":
            found = file_store.get(one.name)
            assert found is None or contents(found) == contents(one)
        else:
            file_store.sweep()
    return Counter(file_store.counts)


def test_neighbours_corrupt_nothing_raise_nothing_and_keep_the_cap(tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(ROOTS)) as workers:
        counts = sum(workers.map(partial(work, tmp_path), range(len(ROOTS))), Counter[str]())
    assert not [name for name in counts if name.startswith(("damaged", "ledgers"))]
    assert min(counts["writes"], counts["reads"], counts["evictions"]) > 10, counts
    files = list(tmp_path.rglob("*.safetensors"))
    used = sum(path.stat().st_size for path in files)
    assert used <= CAP + sum(map(len, encode(piece(0, 0))))
    for worker in (1, 2):
        file_store = FileStore(tmp_path, ROOTS[worker], CAP, 0)
        known = {one.name: one for one in (piece(number, worker) for number in range(PIECES))}
        for path in (tmp_path / ROOTS[worker].hex()).glob("*"):
            name = parse(path.name, "")
            assert name is not None, f"{path} is half done"
            found = file_store.get(name)
            assert found is not None and contents(found) == contents(known[name])
    assert file_store.report()["directory_bytes_used"] >= sum(
        max(path.stat().st_size, FILE_BYTES_MIN) for path in files
    )

"""The record of running forwards: what was written is read, whenever the writer ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings, strategies as st

from hearth.shared.suspects import forward_record as module
from hearth.shared.suspects.forward_record import (
    FILE_BYTES,
    ROWS_MAX,
    ForwardRecord,
    ForwardRow,
    decode_record,
    read_record,
)

NAMES = st.binary(min_size=16, max_size=16)
ROWS = st.builds(
    ForwardRow,
    request_id=st.text("0123456789abcdef-", max_size=64),
    name=NAMES,
    owner=NAMES,
    length=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["admit", "prefill", "image", "decode", "idle"]),
    is_alone=st.booleans(),
    suspect=NAMES,
)
SETS = st.lists(ROWS, max_size=6)
ENDLESS: Final = """
import sys
from pathlib import Path
from hearth.shared.suspects.forward_record import ForwardRecord, ForwardRow
record = ForwardRecord(Path(sys.argv[1]))
sets = [
    [ForwardRow(f"{n}-{i}", b"n" * 16, b"o" * 16, n, n, "decode").packed() for i in range(n)]
    for n in range(1, 65)
]
for turn in range(1 << 60):
    for rows in sets:
        record.write(rows)
    if not turn:
        print("begun", flush=True)
"""


def filled(path: Path, *sets: list[ForwardRow]) -> bytes:
    """Return the file after a write of each of `sets`."""
    record = ForwardRecord(path)
    for rows in sets:
        record.write([row.packed() for row in rows])
    record.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "worker-0.forward"


@settings(max_examples=20)
@given(SETS, SETS)
def test_what_was_written_last_is_read(
    path: Path, one: list[ForwardRow], two: list[ForwardRow]
) -> None:
    filled(path, one, two)
    assert read_record(path) == two


@settings(max_examples=20)
@given(SETS, SETS, SETS, st.data())
def test_a_writer_that_dies_amid_a_write_leaves_the_write_before(
    path: Path,
    one: list[ForwardRow],
    two: list[ForwardRow],
    torn: list[ForwardRow],
    data: st.DataObject,
) -> None:
    """The bytes of a write may be there in any part, in any order: only its last byte counts."""
    before = filled(path, one, two)
    after = filled(path, one, two, torn)
    changed = [at for at in range(FILE_BYTES) if before[at] != after[at]]
    written = data.draw(st.sets(st.sampled_from(changed))) if changed else set()
    written.discard(module._ACTIVE_AT)
    mixed = bytes(after[at] if at in written else before[at] for at in range(FILE_BYTES))
    assert decode_record(mixed) == two
    assert decode_record(after) == torn


@settings(max_examples=20)
@given(st.binary(max_size=200), st.integers(0, FILE_BYTES), st.data())
def test_garbage_names_nobody_or_whom_it_named_and_never_raises(
    path: Path, garbage: bytes, end: int, data: st.DataObject
) -> None:
    whole = filled(path, [ForwardRow("r", b"n" * 16, b"o" * 16, 5, 7, "decode")])
    assert decode_record(garbage) == []
    assert decode_record(whole[: min(end, FILE_BYTES - 1)]) == []
    at = data.draw(st.integers(0, FILE_BYTES - 1))
    bad = bytearray(whole)
    bad[at : at + len(garbage)] = garbage
    for row in decode_record(bytes(bad[:FILE_BYTES])):
        assert row.request_id == "r" and row.name == b"n" * 16


def test_a_lying_checksum_is_no_way_to_an_exception(path: Path) -> None:
    good = ForwardRow("r", b"n" * 16, b"o" * 16, 5, 7, "decode").packed()
    record = ForwardRecord(path)
    record.write([b"\xff" + good[1:]])  # no UTF-8
    assert read_record(path) == []
    record.write([good[:-2] + b"\x63\0"])  # no kind of forward
    assert read_record(path) == []
    record.close()


def test_steps_move_every_row_and_end_with_the_next_write(path: Path) -> None:
    rows = [ForwardRow(n, b"n" * 16, b"o" * 16, 5, 7 * i, "decode") for i, n in enumerate("ab")]
    record = ForwardRecord(path)
    record.write([row.packed() for row in rows])
    record.note_steps(40)
    assert [row.tokens for row in read_record(path)] == [40, 47]
    record.write([row.packed() for row in rows])
    assert [row.tokens for row in read_record(path)] == [0, 7]
    record.close()


def test_more_rows_than_there_is_room_for_are_left_out(path: Path) -> None:
    row = ForwardRow("r", b"n" * 16, b"o" * 16, 5, 7, "decode")
    filled(path, [row] * (ROWS_MAX + 5))
    assert read_record(path) == [row] * ROWS_MAX


def test_the_file_is_private_of_one_size_and_nobody_elses(path: Path, tmp_path: Path) -> None:
    filled(path, [])
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size == FILE_BYTES
    link, other = tmp_path / "link", tmp_path / "other"
    other.write_text("mine")
    link.symlink_to(other)
    assert read_record(link) == [] and read_record(tmp_path / "none") == []
    ForwardRecord(link).close()
    assert other.read_text() == "mine" and not link.is_symlink()


@pytest.mark.process
def test_a_process_killed_at_any_moment_leaves_one_whole_write(path: Path) -> None:
    for attempt in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline()
        for _ in range(1000 * attempt):
            read_record(path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        rows = read_record(path)
        count = len(rows)
        assert [row.request_id for row in rows] == [f"{count}-{i}" for i in range(count)] and count

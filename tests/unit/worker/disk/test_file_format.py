"""One file of the SSD tier: what others read in it, what it costs, what is never believed."""

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from hearth.worker.disk import file_format as module
from hearth.worker.disk.file_format import Damaged, Record, decode, encode, read, write
from tests.helpers.records.disk_records import ROOT, array, contents, record

MB = 1 << 20


def saved(path: Path, one: Record) -> Path:
    with path.open("wb") as file:
        write(file.fileno(), encode(one))
    return path


def reason_of(path: Path, one: Record, bytes_max: int = MB) -> str:
    with pytest.raises(Damaged) as caught:
        read(path, ROOT, one.name, bytes_max)
    return caught.value.reason


def test_the_file_is_valid_safetensors_with_our_data_in_its_metadata(tmp_path: Path) -> None:
    arrays = (array("k", "F16", (1, 2, 3), 1), array("v", "U8", (5,), 2), array("s", "F32", (), 3))
    one = record(7, arrays=arrays)
    with safe_open(saved(tmp_path / "file", one), "np") as file:
        assert set(file.keys()) == {"k", "v", "s"}
        for each in arrays:
            assert file.get_tensor(each.name).tobytes() == each.values.tobytes()
        metadata = file.metadata()
    assert metadata["schema"] == "1" and metadata["end"] == one.end.hex()
    assert all(isinstance(value, str) for value in metadata.values())


def test_writing_copies_no_array_and_reading_gives_views_of_one_buffer(tmp_path: Path) -> None:
    one = record(1)
    parts = encode(one)
    for part, each in zip(parts[1:], one.arrays, strict=True):
        assert np.shares_memory(np.asarray(part), each.values)
    found = read(saved(tmp_path / "file", one), ROOT, one.name, MB)
    bases = {each.values.base is not None and _root_of(each.values) for each in found.arrays}
    assert len(bases) == 1 and all(each.values.flags.aligned for each in found.arrays)


def _root_of(values: np.ndarray) -> int:
    while isinstance(values.base, np.ndarray):
        values = values.base
    return id(values)


def test_an_array_that_is_not_contiguous_is_written_in_its_order() -> None:
    whole = array("a", "BF16", (4, 6), 1).values
    one = record(1, arrays=(module.Array("a", "BF16", whole[:, 1::2]),))
    found = decode(np.frombuffer(b"".join(encode(one)), np.uint8), ROOT, one.name)
    assert contents(found) == contents(one)


def test_a_file_larger_than_the_cap_is_not_read(tmp_path: Path) -> None:
    one = record(1)
    path = saved(tmp_path / "file", one)
    os.truncate(path, 1 << 40)  # sparse: it takes no room
    assert reason_of(path, one) == "size"


def test_a_header_that_claims_terabytes_allocates_nothing(tmp_path: Path) -> None:
    one = record(1)
    path = saved(tmp_path / "file", one)
    file = bytearray(path.read_bytes())
    file[:8] = (1 << 43).to_bytes(8, "little")
    path.write_bytes(file)
    tracemalloc.start()
    try:
        assert reason_of(path, one) == "truncated"
        assert tracemalloc.get_traced_memory()[1] < MB
    finally:
        tracemalloc.stop()


def test_a_link_a_fifo_and_a_directory_are_foreign(tmp_path: Path) -> None:
    one = record(1)
    target = saved(tmp_path / "target", one)
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    for name in ("link", "fifo", "directory"):
        assert reason_of(tmp_path / name, one) == "foreign"


def test_a_file_that_is_not_there_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none", ROOT, record(1).name, MB)


def test_a_file_of_another_schema_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = record(1)
    monkeypatch.setattr(module, "SCHEMA", "0")
    path = saved(tmp_path / "file", one)
    monkeypatch.undo()
    assert reason_of(path, one) == "schema"

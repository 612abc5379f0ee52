"""A damaged file is never another answer: whatever happens to its bytes, it is told."""

import json
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from xxhash import xxh3_128

from hearth.worker.cache.block_hash import pack
from hearth.worker.disk.file_format import DTYPES, Damaged, FileKind, Record, decode, encode, parse
from hearth.worker.disk.file_store import FileStore
from tests.helpers.records.disk_records import OTHER_ROOT, ROOT, array, contents, record

MB = 1 << 20
NAMES = st.text(string.printable, max_size=8).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def file_of(one: Record) -> bytes:
    return b"".join(encode(one))


def decoded(file: bytes, one: Record) -> Record:
    return decode(np.frombuffer(file, np.uint8), one.root, one.name)


@st.composite
def records(draw: st.DrawFn) -> Record:
    entries = draw(st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES)))
    seed = draw(st.integers(0, 1000))
    return record(
        seed,
        count=draw(st.integers(1, 40)),
        kind=draw(st.sampled_from(FileKind)),
        is_canonical=draw(st.booleans()),
        arrays=tuple(
            array(name, dtype, shape, seed + number)
            for number, (name, (dtype, shape)) in enumerate(entries.items())
        ),
    )


@given(records())
def test_what_is_written_is_read_bit_by_bit(one: Record) -> None:
    assert contents(decoded(file_of(one), one)) == contents(one)
    assert parse(one.name.file_name, "") == one.name


ONE = record(1, nbytes=256)
FILE = file_of(ONE)
NEIGHBOURS = {
    "start": record(1, nbytes=256, before=record(2)),
    "tokens": record(3, nbytes=256),
    "kind": record(1, nbytes=256, kind=FileKind.WINDOW),
    "quality": record(1, nbytes=256, is_canonical=False),
    "root": record(1, nbytes=256, root=OTHER_ROOT),
    "start alone": replace(ONE, start=record(2).end),
    "end alone": replace(ONE, end=record(2).end),
    "token count alone": replace(ONE, tokens=pack(range(9))),
}


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return a kind of damage, and FILE after it."""
    kind = draw(st.sampled_from(["truncate", "extend", "flip", "splice", "swap"]))
    place = draw(st.integers(0, len(FILE) - 1))
    if kind == "truncate":
        return kind, FILE[:place]
    if kind == "extend":
        return kind, FILE + draw(st.binary(min_size=1, max_size=100))
    if kind == "flip":
        flipped = bytes([FILE[place] ^ (1 << draw(st.integers(0, 7)))])
        return kind, FILE[:place] + flipped + FILE[place + 1 :]
    other = file_of(NEIGHBOURS[draw(st.sampled_from(sorted(NEIGHBOURS)))])
    if kind == "swap":
        return kind, other
    spliced = FILE[:place] + other[place:]
    return kind, spliced if spliced != FILE else other


@settings(
    max_examples=800,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(damaged())
def test_no_damage_gives_a_record_and_each_is_counted_and_removed(
    tmp_path: Path, case: tuple[str, bytes]
) -> None:
    _, file = case
    path = tmp_path / ROOT.hex() / ONE.name.file_name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(file)
    file_store = FileStore(tmp_path, ROOT, MB, 0)
    assert file_store.at(ONE.end) == [ONE.name]
    assert file_store.get(ONE.name) is None
    (reason, count), *more = file_store.counts.items()
    assert reason.startswith("damaged_") and count == 1 and not more
    assert not path.exists() and file_store.at(ONE.end) == []


def test_every_bit_of_a_file_is_told_when_it_flips() -> None:
    reasons: Counter[str] = Counter()
    for place in range(len(FILE)):
        for bit in range(8):
            file = bytearray(FILE)
            file[place] ^= 1 << bit
            with pytest.raises(Damaged) as caught:
                decoded(bytes(file), ONE)
            reasons[caught.value.reason] += 1
    assert reasons.total() == 8 * len(FILE)
    assert set(reasons) == {"checksum", "foreign", "truncated"}, reasons


@pytest.mark.parametrize("field", sorted(NEIGHBOURS))
def test_a_good_file_of_another_piece_is_told_by_the_names_in_it(field: str) -> None:
    other = NEIGHBOURS[field]
    assert contents(decoded(file_of(other), other)) == contents(other)
    with pytest.raises(Damaged) as caught:
        decoded(file_of(other), ONE)
    assert caught.value.reason == ("root" if field == "root" else "name")


# ---------------------------------------------------------------- files made up by somebody


def forged(header: Any, data: bytes = b"") -> bytes:
    """Return a file whose checksum is right, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":"))
    text = text if isinstance(text, bytes) else text.encode()
    file = len(text).to_bytes(8, "little") + text + data
    opening = 8 + len(b'{"__metadata__":{"checksum":"')
    checksum = xxh3_128(file[:opening] + file[opening + 32 :]).hexdigest().encode()
    return file[:opening] + checksum + file[opening + 32 :]


def header_of(file: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    return header


def data_of(file: bytes) -> bytes:
    return file[8 + int.from_bytes(file[:8], "little") :]


def test_the_forger_of_these_tests_can_forge() -> None:
    assert contents(decoded(forged(header_of(FILE), data_of(FILE)), ONE)) == contents(ONE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@st.composite
def lies(draw: st.DrawFn) -> bytes:
    """Return a file in whose header one thing says something else; its checksum is right."""
    header = header_of(FILE)
    at = header[draw(st.sampled_from(sorted(header)))]
    key = draw(st.sampled_from(sorted(set(at) - {"checksum"})))
    near = st.sampled_from([[0, 1], [2**63, 2], [0, 2**62, 2**62], -1, "1" * 5000, "é", "BF16", []])
    at[key] = draw(JSON | near)
    return forged(header, data_of(FILE))


@settings(max_examples=500)
@given(lies())
def test_a_forged_header_gives_a_record_of_the_same_piece_or_is_told(file: bytes) -> None:
    try:
        one = decoded(file, ONE)
    except Damaged:
        return
    assert one.name == ONE.name and one.root == ONE.root
    assert sum(a.values.nbytes for a in one.arrays) == len(data_of(FILE))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b'{"__metadata__":{"checksum":"' + b"0" * 32 + b'"},"a":' + b"[" * 100_000, "header"),
        (b'{"__metadata__":{"checksum":"' + b"0" * 32 + b'"},"a":' + b"9" * 5000, "header"),
        ({"__metadata__": {"checksum": "0" * 32, "schema": 1}}, "header"),
        ({"__metadata__": {"checksum": "0" * 32}}, "schema"),
        ({"__metadata__": {"checksum": "0" * 32, "schema": "0"}}, "schema"),
    ],
)
def test_deep_huge_or_old_headers_are_told(header: Any, reason: str) -> None:
    with pytest.raises(Damaged) as caught:
        decoded(forged(header), ONE)
    assert caught.value.reason == reason


def drop(header: dict[str, Any]) -> None:
    del header["0.values"]


def shrink(header: dict[str, Any]) -> None:
    header["0.values"] |= {"shape": [1], "data_offsets": [256, 260]}


def overlap(header: dict[str, Any]) -> None:
    header["0.values"]["data_offsets"] = [0, 128]


def leave_a_hole(header: dict[str, Any]) -> None:
    header["0.keys"] |= {"shape": [1, 2, 31, 1], "data_offsets": [0, 124]}


def grow(header: dict[str, Any]) -> None:
    header["0.values"] |= {"shape": [1 << 38], "data_offsets": [256, 256 + (1 << 40)]}


def have_none_of_absurdly_many(header: dict[str, Any]) -> None:
    header["more"] = {"dtype": "U8", "shape": [0, 1 << 39, 1 << 39], "data_offsets": [384, 384]}


@pytest.mark.parametrize(
    "change", [drop, shrink, overlap, leave_a_hole, grow, have_none_of_absurdly_many]
)
def test_arrays_that_are_not_all_of_the_data_in_order_are_told(
    change: Callable[[dict[str, Any]], None],
) -> None:
    header = header_of(FILE)
    assert [header[name]["data_offsets"][0] for name in ("0.keys", "0.values")] == [0, 128]
    change(header)
    with pytest.raises(Damaged) as caught:
        decoded(forged(header, data_of(FILE)), ONE)
    assert caught.value.reason == "layout"


@settings(max_examples=500)
@given(st.binary(max_size=300))
def test_any_bytes_are_told(file: bytes) -> None:
    with pytest.raises(Damaged):
        decoded(file, ONE)


NEARLY = r"\A(rows|state)-(fast|x)-\d+-[0-9a-f]{32}-[0-9a-f]{31,33}\.safetensors\n?\Z"


@given(st.text(max_size=120) | st.from_regex(NEARLY))
def test_any_file_name_is_read_as_none_or_gives_itself_back(text: str) -> None:
    name = parse(text, "")
    assert name is None or name.file_name == text


def test_a_name_whose_ends_are_the_same_is_none() -> None:
    assert parse(ONE.name.file_name.replace(ONE.end.hex(), ONE.start.hex()), "") is None

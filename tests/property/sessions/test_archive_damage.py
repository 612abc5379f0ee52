"""Whatever is done to an archive's file, what comes back was written, and damage is counted."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hearth.shared.durable_journal import Journal
from hearth.worker.sessions.session_archive import SCHEMA, ArchiveEntry
from tests.helpers.records.archive_records import (
    copied,
    loaded,
    plain,
    saved,
    the_file,
    turn,
    turns_of,
)

COUNT = 12
CASES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass
class Written:
    """An archive of COUNT turns; turn n stands in the file up to byte `ends[n]`."""

    directory: Path
    octets: bytes
    ends: list[int]
    turns: list[Any]

    def read(self, to: Path, octets: bytes) -> tuple[list[Any], int]:
        """Return the turns that a file of `octets` gives, and how often it is damaged."""
        memory, counts = loaded(copied(self.directory, to, octets))
        assert not counts.get("unreadable") and not counts.get("records_odd")
        return [plain(each) for each in turns_of(memory)], counts.get("damaged", 0)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    directory = tmp_path_factory.mktemp("archive") / "turns-0"
    turns = [turn(number, 7 * number) for number in range(COUNT)]
    ends = []
    for each in turns:
        saved(directory, [ArchiveEntry(each.made_at, turn=each)])
        ends.append(the_file(directory).stat().st_size)
    octets = the_file(directory).read_bytes()
    yield Written(directory, octets, ends, [plain(each) for each in turns])


@CASES
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_the_one_turn_that_it_is_in(
    written: Written, tmp_path: Path, at: float, bit: int
) -> None:
    place = int(at * len(written.octets))
    octets = bytearray(written.octets)
    octets[place] ^= 1 << bit
    turns, damaged = written.read(tmp_path / "copy", bytes(octets))
    hit = bisect.bisect_right(written.ends, place)
    assert turns == written.turns[:hit] + written.turns[hit + 1 :]
    assert damaged == 1


@CASES
@given(at=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_off_anywhere_holds_all_turns_before(
    written: Written, tmp_path: Path, at: float
) -> None:
    place = int(at * len(written.octets))
    turns, damaged = written.read(tmp_path / "copy", written.octets[:place])
    assert turns == written.turns[: bisect.bisect_right(written.ends, place)]
    assert damaged == (place not in (0, *written.ends))


@given(sizes=st.lists(st.integers(0, 5_000), max_size=8), junk=st.binary(max_size=3_000))
def test_a_frame_inside_a_text_is_text(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], junk: bytes
) -> None:
    """Another journal's frames, and this one's marks without their MAC, are no records."""
    home = tmp_path_factory.mktemp("journals")
    other = Journal(home / "other-0", SCHEMA)
    forged = other.packed({"at": 0.0, "turn": "forged"})
    ours = Journal(home / "ours-0", SCHEMA)
    frames = [
        ours.packed({"number": n, "text": forged * (size // 100)}) for n, size in enumerate(sizes)
    ]
    pairs = zip(ours.packed("a"), ours.packed("bcd"), strict=False)
    mark = bytes(one for one, other in takewhile(lambda pair: pair[0] == pair[1], pairs))
    ours.append([*frames, forged, mark + junk])
    ours.close()
    octets = bytearray(the_file(home / "ours-0").read_bytes())
    for end in accumulate(map(len, frames[:-1]), initial=0):
        octets[end] ^= 1  # each frame loses its mark, so that what is inside is searched
    the_file(home / "ours-0").write_bytes(octets)
    again = Journal(home / "ours-0", SCHEMA)
    assert list(again.read()) == []
    assert again.counts["damaged"] == 1
    again.close()
    other.close()

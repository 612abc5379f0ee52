"""Oldest and cheapest first: what a full directory gives up."""

from dataclasses import replace

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.eviction_order import StoredFile, files_to_evict
from hearth.worker.disk.file_format import FileKind, FileName

NOW = 1_000_000.0
HOUR = 3600.0
ROW_BYTES, STATE_BYTES = 20_000, 100_000_000


def node(line: str, number: int) -> PrefixHash:
    return PrefixHash(f"{line}{number}".encode().ljust(16, b"."))


def rows(line: str, number: int, age_s: float = 0.0, start: PrefixHash | None = None) -> StoredFile:
    name = FileName(FileKind.ROWS, start or node(line, number), node(line, number + 1), 256, True)
    return StoredFile("root", name, 256 * ROW_BYTES, NOW - age_s)


def state(of: StoredFile, nbytes: int = STATE_BYTES, kind: FileKind = FileKind.STATE) -> StoredFile:
    name = FileName(kind, of.name.start, of.name.end, of.name.token_count, True)
    return StoredFile("root", name, nbytes, of.used_at)


def line(name: str, length: int, age_s: float = 0.0) -> list[StoredFile]:
    return [rows(name, number, age_s) for number in range(length)]


def gone(files: list[StoredFile], count: int) -> list[StoredFile]:
    return list(files_to_evict(files, NOW))[:count]


def test_the_line_unused_for_longest_goes_first_from_its_end() -> None:
    old, new = line("old", 3, 5 * HOUR), line("new", 3)
    assert gone(new + old, 3) == old[::-1]


def test_a_trunk_outlives_the_branches_that_share_it_however_old_it_is() -> None:
    trunk = rows("trunk", 0, 100 * HOUR)
    branches = [rows(f"b{number}", 0, number, trunk.name.end) for number in range(3)]
    assert gone([trunk, *branches], 4)[-1] is trunk


def test_rows_of_a_new_conversation_outlive_an_old_one_that_ends_with_a_state() -> None:
    old, new = line("old", 64, HOUR / 4), line("new", 32)
    tip = state(old[-1])
    assert not set(gone([*new, *old, tip], 64)) & set(new), "the first of them is the last to go"


def test_bytes_that_save_fewer_tokens_go_before_rows_as_old() -> None:
    short = line("short", 4)
    snapshots = [state(run) for run in short]
    assert set(gone(short + snapshots, 3)) < set(snapshots)


def left_of(snapshots: list[StoredFile], others: list[StoredFile], count: int) -> list[int]:
    """Return which snapshots are the last `count` to go."""
    order = [file for file in files_to_evict(others + snapshots, NOW) if file in snapshots]
    return sorted(snapshots.index(file) for file in order[-count:])


def test_snapshots_thin_out_the_more_the_further_from_the_lines_end() -> None:
    long = line("long", 64)
    snapshots = [state(run) for run in long]
    assert left_of(snapshots, long, 8) == [15, 31, 47, 55, 59, 61, 62, 63]
    assert left_of(snapshots, long, 2) == [31, 63]


def test_a_snapshot_where_lines_part_stays_longer_than_those_around_it() -> None:
    long = line("long", 64)
    branch = rows("branch", 0, start=long[20].name.end)
    snapshots = [state(run) for run in long]
    assert 20 not in left_of(snapshots, long, 16)
    assert {20, 63} < set(left_of(snapshots, [*long, branch], 3))


def test_windows_far_from_a_lines_end_go_first() -> None:
    long = line("long", 16)
    windows = [state(run, 50_000_000, FileKind.WINDOW) for run in long]
    assert gone(windows[::-1] + long, 12) == windows[:12]


def test_what_no_server_of_this_version_reads_goes_before_all_else_however_young() -> None:
    former = [replace(file, is_read=False) for file in line("former", 2)]
    old = line("old", 2, 100 * HOUR)
    snapshot = state(old[0])
    order = gone([*old, snapshot, *former], 5)
    assert order[:2] == former[::-1] and order[2] == snapshot

"""The file store against a plain model of it, and the order in which files go."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.eviction_order import StoredFile, files_to_evict
from hearth.worker.disk.file_format import FileKind, FileName, Record
from hearth.worker.disk.file_store import FILE_BYTES_MIN, FileStore
from tests.helpers.records.disk_records import OTHER_ROOT, ROOT, contents, record

FILES_MAX = 6
CAP = FILES_MAX * FILE_BYTES_MIN


def pool() -> list[Record]:
    """Return pieces of a small tree: two branches, each kind, each quality."""
    found = []
    trunk = record(1, 64)
    for base in (trunk, record(2, 64, before=trunk), record(3, 64, before=trunk)):
        for kind in FileKind:
            for is_canonical in (True, False):
                fields = {"kind": kind, "is_canonical": is_canonical, "arrays": base.arrays}
                before = None if base is trunk else trunk
                seed = int(base.tokens[0]) // 1000
                found.append(record(seed, 64, before=before, **fields))
    return found


PIECES = pool()


class ShelfMachine(RuleBasedStateMachine):
    """Two workers of one root and one of another share a directory; some files vanish or rot."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.file_stores = [self.file_store() for _ in range(2)]
        self.other = FileStore(self.directory, OTHER_ROOT, CAP, 0)
        self.put: dict[FileName, Record] = {}

    def file_store(self) -> FileStore:
        return FileStore(self.directory, ROOT, CAP, 0)

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    def files(self, root: PrefixHash = ROOT) -> set[str]:
        home = self.directory / root.hex()
        return {path.name for path in home.iterdir()} if home.exists() else set()

    @rule(who=st.integers(0, 1), piece=st.sampled_from(PIECES))
    def puts(self, who: int, piece: Record) -> None:
        had_better = any(
            better.name.file_name in self.files()
            for better in PIECES
            if (better.kind, better.end) == (piece.kind, piece.end) and better.is_canonical
        )
        assert self.file_stores[who].put(piece)
        self.put[piece.name] = piece
        is_there = piece.name.file_name in self.files()
        assert is_there == (piece.is_canonical or not had_better)
        assert self.file_stores[who].holds(piece.name)

    @rule(seed=st.integers(10, 20))
    def another_model_puts(self, seed: int) -> None:
        assert self.other.put(record(seed, 64, root=OTHER_ROOT))

    @rule(who=st.integers(0, 1), piece=st.sampled_from(PIECES))
    def gets(self, who: int, piece: Record) -> None:
        found = self.file_stores[who].get(piece.name)
        if found is not None:
            assert contents(found) == contents(self.put[piece.name])
        else:
            assert piece.name.file_name not in self.files()

    @precondition(lambda self: self.files())
    @rule(data=st.data(), is_removed=st.booleans())
    def a_file_rots_or_goes(self, data: st.DataObject, is_removed: bool) -> None:
        path = self.directory / ROOT.hex() / data.draw(st.sampled_from(sorted(self.files())))
        if is_removed:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1])

    @rule(who=st.integers(0, 1))
    def restarts(self, who: int) -> None:
        self.file_stores[who] = self.file_store()

    @rule(who=st.integers(0, 1))
    def sweeps(self, who: int) -> None:
        self.file_stores[who].sweep()

    @invariant()
    def capped_and_whole(self) -> None:
        files = self.files()
        assert len(files) + len(self.files(OTHER_ROOT)) <= FILES_MAX
        assert not any(name.startswith(".") for name in files)

    @invariant()
    def all_of_it_is_found(self) -> None:
        for file_store in self.file_stores:
            file_store.refresh()
            found = {name for piece in PIECES for name in file_store.at(piece.end)}
            assert {name.file_name for name in found} == self.files()
            starts = {piece.start for piece in PIECES}
            assert found == {name for start in starts for name in file_store.leaving(start)}
            assert file_store.bytes_used == len(found) * FILE_BYTES_MIN

    @invariant()
    def one_of_a_kind(self) -> None:
        kept = [piece for piece in PIECES if piece.name.file_name in self.files()]
        assert len({(piece.kind, piece.end) for piece in kept}) == len(kept)


ShelfMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestShelf = ShelfMachine.TestCase


# ---------------------------------------------------------------- the order


@st.composite
def trees(draw: st.DrawFn) -> list[StoredFile]:
    """Return files of random trees under two roots; nodes may miss, or run in a circle."""
    files = []
    for number in range(draw(st.integers(0, 30))):
        start, end = draw(st.integers(0, number)), draw(st.sampled_from([number + 1, 0]))
        if start == end:
            continue
        name = FileName(
            draw(st.sampled_from(FileKind)),
            PrefixHash(start.to_bytes(16, "big")),
            PrefixHash(end.to_bytes(16, "big")),
            draw(st.integers(1, 5000)),
            draw(st.booleans()),
        )
        used_at = float(draw(st.integers(0, 100_000)))
        files.append(
            StoredFile(draw(st.sampled_from("ab")), name, draw(st.integers(1, 99)), used_at)
        )
    return list(dict.fromkeys(files))


def has_circle(files: list[StoredFile]) -> bool:
    return any(file.name.end == bytes(16) for file in files)


@settings(max_examples=250)
@given(trees())
def test_every_file_goes_once_and_none_before_what_hangs_from_it(files: list[StoredFile]) -> None:
    order = list(files_to_evict(files, 100_000.0))
    assert sorted(order, key=repr) == sorted(files, key=repr)
    if has_circle(files):
        return
    for number, file in enumerate(order):
        if file.name.kind is FileKind.ROWS:
            assert not any(later.needs == file.end for later in order[number + 1 :])

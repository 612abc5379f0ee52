"""KV files over ranks: each has its part, and what one of them lacks is missing on all."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.errors import StartError
from hearth.worker.kv.serialise_kv import UnreadableRecord
from hearth.worker.ranks import leading_kv
from hearth.worker.ranks.leading_kv import FOUND_EVENT, LeadingDiskThread, keep_on_followers
from tests.helpers.ranks.followed_disks import WAIT_S, DisksOfRanks, rows_of, states_of

Make = Callable[..., DisksOfRanks]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make the disks of two ranks, or of more; open them, but where some rank refuses."""
    made: list[DisksOfRanks] = []

    def make(size: int = 2, **how: Any) -> DisksOfRanks:
        made.append(DisksOfRanks(tmp_path, size, **how))
        return made[-1]

    yield make
    for disks in made:
        disks.close()


@pytest.fixture
def disks(make: Make, request: pytest.FixtureRequest) -> DisksOfRanks:
    """The open disks of two ranks, or of as many as a test's parameter says."""
    disks = make(getattr(request, "param", 2))
    disks.open()
    return disks


def numbers(part: Any) -> list[Any]:
    """Return all numbers of rows or states, to compare bit by bit."""
    layers = [getattr(layer, "arrays", layer) for layer in part.layers]
    return [array.tolist() for layer in layers for array in layer]


@pytest.mark.parametrize("disks", [2, 3], indirect=True)
def test_every_rank_writes_its_own_part_and_has_it_back_by_the_number_that_is_told(
    disks: DisksOfRanks,
) -> None:
    first = disks.record(1)
    disks.write(first, disks.record(2, before=first))
    assert disks.holders(first.name) == sorted(disks.stores)
    (found,) = disks.read(first.name)
    assert found is not None
    rows = disks.commands.rows(rows_of(0, 1))
    keep_on_followers(disks.commands, found, rows.handle)
    assert found.arrays[0].values.tolist() == numbers(rows)[0]
    for follower in disks.followers:
        own = follower.kv.rows[rows.handle]
        assert numbers(own) == numbers(rows_of(follower.link.rank, 1))
    assert len({str(numbers(rows_of(rank, 1))) for rank in disks.stores}) == len(disks.stores)


def test_a_snapshot_is_stored_on_every_rank(disks: DisksOfRanks) -> None:
    snapshot = disks.snapshot(3)
    disks.write(snapshot)
    stored = [store.get(snapshot.name) for store in disks.stores.values()]
    kinds = [array.dtype for record in stored if record is not None for array in record.arrays]
    assert kinds == ["F32"] * 2
    (found,) = disks.read(snapshot.name)
    assert found is not None
    states = disks.commands.states(states_of(0, 3))
    keep_on_followers(disks.commands, found, states.handle)
    own, expected = numbers(disks.followers[0].kv.states[states.handle]), numbers(states_of(1, 3))
    assert own == expected


@pytest.mark.parametrize("disks", [2, 3], indirect=True)
def test_what_one_rank_has_lost_is_missing_on_all_and_written_anew(disks: DisksOfRanks) -> None:
    first = disks.record(1)
    second = disks.record(2, before=first)
    disks.write(first, second)
    last = max(disks.stores)
    (disks.stores[last].home / first.name.file_name).unlink()
    found = disks.read(first.name, second.name)
    assert [record is not None for record in found] == [False, True]
    assert disks.leading.counts["reads_lacked_by_rank"] == 1
    assert not disks.leading.holds(first.name), "else it would never be written again"
    disks.write(disks.record(1))
    assert all(record is not None for record in disks.read(first.name, second.name))


def test_a_rank_that_takes_too_long_to_read_is_not_waited_for(
    disks: DisksOfRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading_kv, "RECALL_S_MAX", 0.2)
    first = disks.record(1)
    disks.write(first)
    disks.stores[1].gate.clear()
    assert disks.read(first.name) == [None]
    assert disks.leading.counts["reads_late"] == 1
    disks.stores[1].gate.set()
    assert disks.leading.holds(first.name), "it is only late"
    assert disks.read(first.name) != [None]


def test_reads_that_wait_for_one_another_fall_due_by_when_they_were_asked(
    disks: DisksOfRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(leading_kv, "RECALL_S_MAX", WAIT_S)
    monkeypatch.setattr(leading_kv, "monotonic", lambda: now_s)
    first = disks.record(1)
    disks.write(first)
    for store in disks.stores.values():
        store.gate.clear()
    asked = [disks.ask(first.name) for _ in range(3)]
    now_s = WAIT_S
    disks.stores[0].gate.set()
    assert all(answered.wait(WAIT_S / 2) for answered, _ in asked), "each waits for a disk anew"
    assert [answers for _, answers in asked] == [[[None]]] * 3
    assert disks.leading.counts["reads_late"] == 3


def test_an_answer_that_comes_while_its_read_is_given_up_ends_nothing(
    disks: DisksOfRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Handle(int):
        """The read's number; between two looks for it the I/O thread gives the read up."""

        looks = 0

        def __hash__(self) -> int:
            assert not self.looks or answered.wait(WAIT_S)
            self.looks += 1
            return super().__hash__()

    monkeypatch.setattr(leading_kv, "RECALL_S_MAX", 0.2)
    first = disks.record(1)
    disks.write(first)
    disks.stores[1].gate.clear()
    handle = Handle(disks.commands.new_handle() + 1)
    answered, _ = disks.ask(first.name)
    disks.link.on_event(1, FOUND_EVENT, [handle, [True]])
    assert answered.wait(WAIT_S) and handle.looks == 1


def test_a_rank_whose_disk_stands_still_queues_what_rank_0_may_and_lacks_the_rest(
    make: Make,
) -> None:
    disks = make()
    records = [disks.record(seed) for seed in range(1, 6)]
    leading = disks.open(queue_bytes=2 * records[0].nbytes)
    disks.stores[1].gate.clear()
    for record in records:
        assert leading.write(record) and leading.flush(WAIT_S), "rank 0 waits for nobody"
    disks.settle()
    followed = disks.followers[0].disk.thread
    assert followed.queue_bytes == 2 * records[0].nbytes
    assert followed.counts["writes_refused_queue"] == 3
    disks.stores[1].gate.set()
    assert disks.flush()
    found = disks.read(*[record.name for record in records])
    assert [record is not None for record in found] == [True] * 2 + [False] * 3


def test_at_the_end_every_rank_takes_all(make: Make) -> None:
    disks = make()
    records = [disks.record(seed) for seed in range(1, 6)]
    leading = disks.open(queue_bytes=records[0].nbytes)
    for store in disks.stores.values():
        store.gate.clear()
    leading.lift_limit()
    assert all([leading.write(record) for record in records])
    disks.settle()
    for store in disks.stores.values():
        store.gate.set()
    assert disks.flush()
    assert [disks.holders(record.name) for record in records] == [[0, 1]] * 5


def test_what_waits_on_the_slowest_rank_is_written_before_it_ends(tmp_path: Path) -> None:
    disks = DisksOfRanks(tmp_path, 2)
    leading = disks.open()
    disks.stores[1].gate.clear()
    first = disks.record(1)
    second = disks.record(2, before=first)
    assert leading.write(first) and leading.write(second)
    assert leading.flush(WAIT_S), "rank 0 waits for nobody"
    disks.close()
    assert disks.holders(second.name) == [0, 1]


def test_what_was_read_goes_on_every_rank_once_rank_0_has_let_go_of_it(disks: DisksOfRanks) -> None:
    first = disks.record(1)
    disks.write(first)
    found = disks.read(first.name)
    assert len(disks.followers[0].kv.reads) == 1
    disks.settle()
    assert len(disks.followers[0].kv.reads) == 1, "it may be taken in yet"
    del found
    gc.collect()
    disks.settle()
    assert not disks.followers[0].kv.reads


def test_a_rank_that_cannot_use_what_it_read_says_so_and_nobody_keeps_it(
    disks: DisksOfRanks,
) -> None:
    first = disks.record(1)
    disks.write(first)
    (found,) = disks.read(first.name)
    assert found is not None
    disks.followers[0].kv.are_rows = lambda kept, start, end: False
    rows = disks.commands.rows(rows_of(0, 1))
    with pytest.raises(UnreadableRecord, match=r"of other shapes than the model's \(rank 1\)"):
        keep_on_followers(disks.commands, found, rows.handle)
    disks.leading.discard(found.name)
    disks.settle()
    wait_until(lambda: not disks.holders(first.name))
    assert rows.handle not in disks.followers[0].kv.rows


@pytest.mark.parametrize("how", ["discard", "drop", "clear"])
def test_what_is_removed_is_removed_on_every_rank(disks: DisksOfRanks, how: str) -> None:
    first = disks.record(1)
    disks.write(first)
    removing: dict[str, Callable[[LeadingDiskThread], None]] = {
        "discard": lambda leading: leading.discard(first.name),
        "drop": lambda leading: leading.drop([first.name]),
        "clear": lambda leading: leading.clear(),
    }
    removing[how](disks.leading)
    assert not disks.leading.holds(first.name)
    wait_until(lambda: not disks.holders(first.name))
    disks.write(disks.record(2))


def test_the_report_has_the_files_and_bytes_of_each_rank(disks: DisksOfRanks) -> None:
    disks.write(disks.record(1), disks.record(2))
    report = disks.leading.report()
    assert report["files"] == 2
    keys = ("rank", "host", "files", "queue_bytes")
    told = [[row[key] for key in keys] for row in report["ranks"]]
    assert told == [[rank, "127.0.0.1", 2, 0] for rank in sorted(disks.stores)[1:]]


def test_a_rank_that_may_not_keep_files_is_an_error_at_the_start(tmp_path: Path) -> None:
    disks = DisksOfRanks(tmp_path, 2)
    disks.refusals[1] = StartError("KV_CACHE_DIR belongs to user 7")
    with pytest.raises(StartError, match=r"Rank 1 \(127.0.0.1\) cannot keep KV on disk: .* user 7"):
        disks.open()
    disks.followers[0].link.end()


def test_the_smallest_cap_of_a_rank_is_that_of_all(make: Make) -> None:
    disks = make(3, caps={0: 9 << 20, 1: 5 << 20, 2: 7 << 20})
    assert disks.open().file_store.bytes_max == 5 << 20


def wait_until(is_so: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(500):
        if is_so():
            return
        done.wait(0.02)
    raise AssertionError("it never came to that")

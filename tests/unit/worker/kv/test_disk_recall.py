"""Checks that KV on disk is read back, not computed twice, when memory is short."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.shared.wire_messages import Progress
from hearth.worker.cache.extent_store import MB
from hearth.worker.disk.file_format import Array, FileKind, FileName, Record
from hearth.worker.disk.file_store import FileStore
from scripts.harness.socketless_worker import Machine, machine
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.worker.disk_workers import Workers
from tests.helpers.worker.kv_prompts import KINDS, follow, prompt


def give_up_parts(warm: Machine) -> None:
    """Have all windows and snapshots go, as they do when room is short; rows stay."""
    store = warm.keeper.store
    for slot in list(warm.keeper.slots):
        warm.keeper.release_slot(slot)
    for extent in list(store.extents):
        store.set_window(extent, None, extent.end.position)
    for node in list(store.nodes):
        store.set_snapshot(node, None)


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "falcon_h1"])
def test_a_snapshot_that_made_way_comes_back_though_the_rows_are_still_there(
    workers: Workers, name: str
) -> None:
    warm, ids = workers.start(name, is_exact=True), prompt(name, 150, 100)
    cold = warm.ask(ids)
    workers.flush()
    give_up_parts(warm)
    again = warm.ask(ids)
    assert again.cached == again.request.query.limit
    assert workers.file_store.counts["reads"] > 0
    assert again.tokens == cold.tokens
    warm.check()


@pytest.mark.parametrize("name", KINDS)
def test_what_made_way_while_a_prompt_waited_for_its_turn_is_read_from_disk(
    workers: Workers, name: str
) -> None:
    warm, ids = workers.start(name, slots_max=1), prompt(name, 150, 100)
    warm.ask(ids)
    other = warm.submit(prompt(name, 200, 100, seed=3), 8)
    warm.run(until=lambda: bool(other.request.completion_tokens))
    waiting = warm.submit(ids)
    assert waiting.request.kept.recall is None, "it is in memory"
    workers.flush()
    warm.keeper.release(1 << 40)
    warm.run()
    assert warm.settled(waiting).cached == waiting.request.query.limit
    assert waiting.usage is not None and waiting.usage.source == "ssd"


@pytest.mark.parametrize("name", KINDS)
def test_conversations_that_take_turns_in_room_for_one_are_read_once(
    workers: Workers, name: str
) -> None:
    turns, count = 3, 3
    alone = machine(name, slots_max=1)
    ids = prompt(name, 150, 100)
    for turn in range(turns):
        ids = follow(name, ids, alone.ask(ids).request.sampled, 60, seed=turn)
    alone.keeper.release_slot(alone.keeper.slots[0])
    budget_mb = 1.3 * alone.keeper.store.budget.bytes_used / MB
    warm = workers.start(name, slots_max=1, budget_mb=budget_mb)
    talks = [prompt(name, 150, 100, seed=seed) for seed in range(count)]
    read = [0] * count
    for turn in range(turns):
        for number in range(count):
            answer = warm.ask(talks[number])
            workers.flush()
            assert answer.cached >= read[number], (turn, number)
            read[number] = answer.request.query.limit
            sampled = answer.request.sampled
            talks[number] = follow(name, talks[number], sampled, 60, seed=turn)
    warm.check()


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_what_finds_no_room_in_memory_is_on_disk_all_the_same(
    workers: Workers, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, ids = workers.start(name, is_exact=True), prompt(name, 150, 100)
    monkeypatch.setattr(warm.keeper.transfer, "has_room_at", lambda *_: False)
    cold = warm.ask(ids)
    workers.flush()
    again = workers.start(name, is_exact=True).ask(ids)
    assert again.cached == again.request.query.limit
    assert again.tokens == cold.tokens
    assert all(np.array_equal(a, b) for a, b in zip(again.logits, cold.logits, strict=True))


def test_nothing_is_read_that_a_live_slot_holds(workers: Workers) -> None:
    warm, ids = workers.start("qwen3_5"), prompt("qwen3_5", 150, 100)
    first = warm.ask(ids)
    workers.flush()
    store = warm.keeper.store
    for node in list(store.nodes):
        store.set_snapshot(node, None)
    following = warm.submit(follow("qwen3_5", ids, first.request.sampled, 30))
    assert following.request.kept.recall is None
    warm.run()
    assert warm.settled(following).cached > len(ids)


def test_what_was_read_before_the_cache_was_emptied_does_not_come_back(workers: Workers) -> None:
    ids = prompt("qwen3", 150, 100)
    workers.start("qwen3").ask(ids)
    workers.flush()
    warm = workers.start("qwen3")
    answer = warm.submit(ids)
    found = warm.posted.get(timeout=60)
    warm.scheduler.forget()
    warm.scheduler.take_recalled(found)
    assert warm.keeper.store.budget.bytes_used == 0
    warm.run()
    assert warm.settled(answer).cached == 0


def test_a_client_that_was_told_of_kv_that_the_disk_lost_is_told_of_that(workers: Workers) -> None:
    ids = prompt("qwen3", 150, 100)
    workers.start("qwen3").ask(ids)
    workers.flush()
    warm = workers.start("qwen3")
    answer = warm.submit(ids)
    told = answer.request.kept.reported_tokens
    assert told == answer.request.query.limit
    found = warm.posted.get(timeout=60)
    warm.scheduler.take_recalled(replace(found, records=[None] * len(found.records)))
    events = warm.step()
    done = [each.done_tokens for each in events if isinstance(each, Progress)]
    assert done[0] == 0 < done[1] < told
    warm.run()
    assert warm.settled(answer).cached == 0


def test_a_conversation_that_came_back_is_not_its_own_sub_agent(workers: Workers) -> None:
    ids = prompt("qwen3", 150, 100)
    workers.start("qwen3").ask(ids)
    workers.flush()
    warm = workers.start("qwen3")
    answer = warm.ask(ids)
    assert answer.cached == answer.request.query.limit
    (slot,) = warm.keeper.slots
    assert slot.line is not None and slot.line.sponsor is None


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_exact_mode_asks_the_disk_for_places_at_which_it_resumes(
    workers: Workers, name: str
) -> None:
    """A prompt that parts where another ended has no cut there: exact mode goes on further back."""
    drawn: list[int] = np.random.default_rng(1).integers(100, 2_000, 300).tolist()
    first = workers.start(name, is_exact=True)
    for length in (129, 230):
        first.ask(drawn[:length], 1)
    first.keeper.queue_unwritten()
    workers.flush()
    warm = workers.start(name, is_exact=True)
    other = warm.ask([*drawn[:229], *drawn[240:]], 4)
    assert 229 not in other.request.query.cuts
    assert other.cached == 128
    cold = machine(name, keeps=False, is_exact=True).ask([*drawn[:229], *drawn[240:]], 4)
    assert all(map(np.array_equal, other.logits, cold.logits))


class FullDisk(FileStore):
    """A disk that refuses everything until it is given room."""

    is_full = True

    def put(self, record: Any, is_needed: bool = False) -> bool:
        return not self.is_full and super().put(record, is_needed)


def test_what_a_full_disk_refused_is_written_at_the_end(tmp_path: Path) -> None:
    workers, ids = Workers(tmp_path, FullDisk), prompt("qwen3", 150, 100)
    try:
        warm = workers.start("qwen3")
        answer = warm.ask(ids)
        workers.flush()
        assert isinstance(workers.file_store, FullDisk)
        workers.file_store.is_full = False
        warm.keeper.queue_unwritten()
        workers.flush()
        again = workers.start("qwen3").ask(ids)
        assert again.cached == again.request.query.limit
        assert again.tokens == answer.tokens
    finally:
        workers.kill()


def odd(record: Record, how: str) -> Record:
    """Return a record whose arrays are of another type or shape than the model's."""
    arrays = [
        Array(array.name, "F16", array.values.astype("<f2"))
        if how == "type"
        else Array(array.name, array.dtype, np.ascontiguousarray(array.values[..., 1:]))
        for array in record.arrays
    ]
    return replace(record, arrays=tuple(arrays))


def spoil(workers: Workers, warm: Machine, kind: FileKind, how: str) -> None:
    """Have a worker's files of a kind be odd ones."""
    store = workers.file_store
    store.refresh()
    nodes = {node.name for node in warm.keeper.store.nodes}
    names: set[FileName] = {name for node in nodes for name in store.at(node)}
    odd_names = [name for name in names if name.kind is kind]
    assert odd_names, kind
    for name in odd_names:
        record = store.get(name)
        assert record is not None
        store.remove(name)
        assert store.put(odd(record, how))


@pytest.mark.parametrize("how", ["type", "shape"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3", FileKind.ROWS),
        ("gpt_oss", FileKind.WINDOW),
        ("qwen3_5", FileKind.STATE),
    ],
)
def test_kv_of_other_types_or_shapes_than_the_models_is_read_anew(
    workers: Workers, name: str, kind: FileKind, how: str
) -> None:
    warm, ids = workers.start(name, tiny=True), prompt(name, 150, 400)
    first = warm.ask(ids)
    workers.flush()
    spoil(workers, warm, kind, how)
    again = workers.start(name, tiny=True)
    same_tokens(again.ask(ids), first)
    assert again.keeper.disk.counts["recalls_unreadable"] == 1


# ---------------------------------------------------------------- the memory guard

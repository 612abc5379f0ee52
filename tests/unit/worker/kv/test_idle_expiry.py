"""After the TTL an idle worker's memory goes back to the system, and the disk keeps the KV."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from hearth.worker.cache.conversation_priority import Conversation
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import Record
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv import idle_work as module
from hearth.worker.kv.idle_work import IdleExpiry
from scripts.harness.socketless_worker import Machine, machine
from scripts.harness.store_builders import ROOT
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.worker.disk_workers import Workers
from tests.helpers.worker.kv_prompts import KINDS, follow, kept_bytes, prompt

TTL_S = 1000.0


class Idle:
    """The idle time of a worker, whose clock is ahead by `ahead_s`."""

    def __init__(self, warm: Machine) -> None:
        self.ahead_s = 0.0
        self.steps = 0
        self._warm = warm
        self._expiry = IdleExpiry(warm.keeper, lambda: time.monotonic() + self.ahead_s)

    def step(self) -> bool:
        self.steps += 1
        return self._expiry.step()

    def pass_by(self, seconds: float) -> None:
        """Have so much time go by, and the worker do what it does meanwhile."""
        self._warm.work_ahead()
        self.ahead_s += seconds
        disk = self._warm.keeper.disk
        while self.step() or (disk is not None and not disk.thread.is_drained):
            time.sleep(0.001)


def expired_of(warm: Machine) -> tuple[int, int]:
    evictor = warm.keeper.transfer.evictor
    return evictor.evicted["expired"], evictor.evicted_bytes["expired"]


@pytest.mark.parametrize("name", KINDS)
def test_memory_goes_back_after_the_ttl_and_the_disk_serves_the_next_turn(
    workers: Workers, name: str
) -> None:
    warm, ids = workers.start(name, ttl_s=TTL_S), prompt(name, 300, 100)
    machine(name, keeps=False).ask(ids)  # loads what is loaded once
    gc.collect()  # what an earlier test left must not go meanwhile
    mx.clear_cache()
    before = mx.get_active_memory()
    idle, answer = Idle(warm), warm.ask(ids)
    idle.pass_by(TTL_S - 100)
    assert expired_of(warm) == (0, 0) and kept_bytes(warm) + len(warm.keeper.slots)
    held = mx.get_active_memory() - before
    idle.pass_by(200)
    count, nbytes = expired_of(warm)
    assert count > 0 and nbytes > 0.5 * held > 0
    assert kept_bytes(warm) == len(warm.keeper.slots) == len(warm.keeper.store) == 0
    assert mx.get_active_memory() - before < 100_000 and mx.get_cache_memory() == 0
    longer = follow(name, ids, answer.tokens, 30)
    again = warm.ask(longer)
    assert again.usage is not None and again.usage.source == "ssd"
    assert again.prefilled <= len(longer) - len(ids) - len(answer.tokens) + 16
    cold = machine(name, keeps=False).ask(longer)
    same_tokens(again, cold)
    warm.check()


def test_a_ttl_of_0_is_never() -> None:
    warm = machine("qwen3")
    warm.ask(prompt("qwen3", 300, 100))
    Idle(warm).pass_by(1e9)
    assert len(warm.keeper.slots) >= 1 and expired_of(warm) == (0, 0)


def test_nothing_goes_while_a_request_runs() -> None:
    warm = machine("qwen3", ttl_s=TTL_S)
    idle = Idle(warm)
    warm.ask(prompt("qwen3", 300, 100))
    running = warm.submit(prompt("qwen3", 200, 100, seed=3), 8)
    warm.run(until=lambda: bool(running.request.completion_tokens))
    extents = len(warm.keeper.store)
    idle.ahead_s = 10 * TTL_S
    assert not idle.step() and len(warm.keeper.store) == extents > 0
    warm.run()
    idle.pass_by(0.0)
    assert len(warm.keeper.store) == 0
    warm.check()


@pytest.mark.parametrize("line_idle_s", [0.0, TTL_S])
def test_what_was_used_since_stays_with_its_slot(line_idle_s: float) -> None:
    """Also where it is an older line's, as of one that is likelier to come back."""
    warm = machine("qwen3", ttl_s=TTL_S)
    old, young = prompt("qwen3", 300, 100), prompt("qwen3", 300, 80, seed=5)
    for ids in (old, young):
        warm.ask(ids)
        warm.work_ahead()
    for line in warm.keeper.lines.all:
        line.used_at -= TTL_S / 2
        line.sponsor = None  # the first does not wait for the second
    for slot in warm.keeper.slots:
        slot.used_at -= TTL_S / 2
    warm.ask(young)
    for line in warm.keeper.lines.all:
        line.used_at -= line_idle_s
    Idle(warm).pass_by(TTL_S / 2 + 1)
    assert warm.ask(young).prefilled <= 16
    assert warm.ask(old).cached == 0
    warm.check()


def test_a_trunk_that_a_younger_conversation_read_stays_though_its_branch_goes() -> None:
    warm = machine("qwen3", ttl_s=TTL_S)
    long = prompt("qwen3", 300, 100)
    trunk = [*long[:256], *prompt("qwen3", 8)]
    warm.ask(long, conversation=Conversation(1, "old"))
    warm.ask(trunk, conversation=Conversation(2, "young"))
    for slot in warm.keeper.slots:
        warm.keeper.release_slot(slot)
    for extent in list(warm.keeper.store.extents):
        if extent.end.position > 256 and extent.line.number == 2:
            warm.keeper.store.remove(extent)  # so that the trunk ends there once the branch goes
    (old,) = [line for line in warm.keeper.lines.all if line.number == 1]
    old.used_at -= TTL_S
    Idle(warm).pass_by(1.0)
    assert expired_of(warm)[0] > 0
    assert {extent.end.position for extent in warm.keeper.store.extents} == {64, 128, 192, 256}
    warm.check()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("has_disk", [True, False])
def test_a_request_that_comes_amid_it_goes_on_from_what_is_left(
    workers: Workers, name: str, has_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEP_BYTES", 1)
    start: Any = workers.start if has_disk else machine
    warm, ids = start(name, ttl_s=TTL_S), prompt(name, 300, 100)
    warm.ask(ids)
    for slot in warm.keeper.slots:
        warm.keeper.release_slot(slot)
    if has_disk:
        workers.flush()
    idle, extents = Idle(warm), len(warm.keeper.store)
    idle.ahead_s = TTL_S + 1
    assert idle.step() and idle.step()
    assert len(warm.keeper.store) == extents - 2
    again, cold = warm.ask(ids), machine(name, keeps=False).ask(ids)
    same_tokens(again, cold)
    if has_disk:
        assert again.prefilled <= 16
    else:
        assert 0 < again.cached < again.request.query.limit
    warm.check()
    idle.pass_by(TTL_S + 1)
    assert len(warm.keeper.store) == 0


# ---------------------------------------------------------------- written before it goes


class Gated(FileStore):
    """A disk that loses what it is given unless `works`, and is at it until `gate` is set."""

    works = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate = threading.Event()
        self.gate.set()

    def put(self, record: Record, is_needed: bool = False) -> bool:
        assert self.gate.wait(60)
        return self.works and super().put(record, is_needed)


def unwritten(tmp_path: Path) -> tuple[Machine, DiskThread, Gated]:
    """Return a worker whose KV is not on its disk, for want of room in the queue."""
    disk = Gated(tmp_path, ROOT, 1 << 30, 0)
    disk_thread = DiskThread(disk, queue_bytes_max=1)
    warm = machine("qwen3", disk_thread=disk_thread, ttl_s=TTL_S)
    warm.ask(prompt("qwen3", 600, 100))
    warm.work_ahead()
    assert not any(extent.is_stored for extent in warm.keeper.store.extents)
    return warm, disk_thread, disk


def test_what_the_queue_had_no_room_for_is_written_part_by_part_before_anything_goes(
    tmp_path: Path,
) -> None:
    warm, disk_thread, _ = unwritten(tmp_path)
    extents = len(warm.keeper.store)
    disk_thread.queue_bytes_max = warm.layers.row_cost(None)[0] * 100  # a chunk and a half
    idle = Idle(warm)
    idle.ahead_s = TTL_S + 1
    while len(warm.keeper.store):
        is_written = all(extent.is_stored for extent in warm.keeper.store.extents)
        is_written = is_written and disk_thread.is_drained
        idle.step()
        assert is_written or len(warm.keeper.store) == extents, "first all is written"
        time.sleep(0.001)
    assert idle.steps > 3 and disk_thread.is_drained
    assert warm.keeper.disk_report()["files"] >= extents
    again = warm.ask(prompt("qwen3", 600, 100))
    assert again.usage is not None and again.usage.source == "ssd" and again.prefilled <= 16
    disk_thread.close()


def test_nothing_goes_before_the_disk_is_done_with_what_it_took(tmp_path: Path) -> None:
    warm, disk_thread, disk = unwritten(tmp_path)
    disk_thread.queue_bytes_max = 1 << 28
    disk.gate.clear()
    idle, extents = Idle(warm), len(warm.keeper.store)
    idle.ahead_s = TTL_S + 1
    while idle.step():
        pass
    assert not any(idle.step() for _ in range(20)), "it waits without a step of work"
    assert all(extent.is_stored for extent in warm.keeper.store.extents)
    assert len(warm.keeper.store) == extents
    disk.gate.set()
    idle.pass_by(0.0)
    assert len(warm.keeper.store) == 0
    disk_thread.close()


@pytest.mark.parametrize("queue_bytes_max", [1, 1 << 28])
def test_what_the_disk_does_not_take_is_offered_once_and_goes(
    tmp_path: Path, queue_bytes_max: int
) -> None:
    """1 byte: no run fits into the queue; else: the disk has no room."""
    warm, disk_thread, disk = unwritten(tmp_path)
    disk.works = False
    disk_thread.queue_bytes_max = queue_bytes_max
    extents = len(warm.keeper.store)
    Idle(warm).pass_by(TTL_S + 1)
    assert len(warm.keeper.store) == 0 and expired_of(warm)[0] == extents
    assert disk_thread.counts["writes_lost"] <= extents
    assert warm.ask(prompt("qwen3", 600, 100)).cached == 0
    disk_thread.close()


def test_a_look_finds_nothing_for_as_long_as_nothing_can_expire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []
    warm = machine("qwen3", ttl_s=TTL_S)
    idle = Idle(warm)
    find = module.find_expired
    monkeypatch.setattr(module, "find_expired", lambda *how: looks.append(how) or find(*how))
    for _ in range(100):
        idle.pass_by(TTL_S / 10)
    assert len(looks) <= 11, "once a TTL where nothing is kept"
    looks.clear()
    warm.ask(prompt("qwen3", 300, 100))
    for slot in warm.keeper.slots:
        slot.used_at += idle.ahead_s
    for line in warm.keeper.lines.all:
        line.used_at += idle.ahead_s
    for _ in range(30):
        idle.pass_by(TTL_S / 10)
    assert expired_of(warm)[0] > 0 and len(looks) <= 6

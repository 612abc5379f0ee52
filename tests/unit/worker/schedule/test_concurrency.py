"""As many requests compute at once as have room: counted, not timed."""

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from hearth.shared.settings import load_settings
from hearth.worker.schedule.admission_and_disk_recall import Admission
from hearth.worker.setup.kv_setup import live_slots_max, running_max
from scripts.harness.socketless_worker import Machine
from tests.helpers.worker.watched_memory import Watched, ids, slot_bytes

DEFAULTS = load_settings({}, None)
HELD = live_slots_max(DEFAULTS)
RUNNING = running_max(DEFAULTS, is_batched=True)


def machine_of(limit_tokens: int = 0, name: str = "qwen3", **more: Any) -> Machine:
    """Return a worker with the default counts, that may hold so many tokens of live caches."""
    rules = {"slots_max": HELD, "running_max": RUNNING} | more
    limit = slot_bytes(limit_tokens, name) if limit_tokens else 1 << 60
    return Watched(limit, name=name, **rules).machine


def run(made: Machine) -> int:
    """Compute until all is answered; return the most that ran at once."""
    most = 0
    while not made.scheduler.is_idle:
        made.step()
        most = max(most, made.scheduler.running)
    return most


def test_as_many_streams_as_fit_run_at_once_by_default() -> None:
    made, count = machine_of(), 32
    answers = [made.submit(ids(20, seed), 40) for seed in range(count)]
    made.run(until=lambda: all(answer.request.sampled for answer in answers))
    assert made.scheduler.running == count and not any(answer.reason for answer in answers)
    made.run()
    assert {answer.reason for answer in answers} == {"length"}
    made.check()


def test_one_more_than_may_compute_waits_and_an_idle_cache_takes_nobodys_place() -> None:
    made = machine_of(running_max=2)
    for seed in range(6):
        made.ask(ids(30, seed), 2)
    assert len(made.keeper.slots) == 6, "more are held than compute"
    answers = [made.submit(ids(30, seed), 6) for seed in range(10, 15)]
    assert run(made) == 2
    assert all(answer.reason == "length" for answer in answers)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gpt_oss"])
def test_what_a_first_forward_will_allocate_is_promised_to_those_that_have_a_slot(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States and windows are not there before it, and rows are."""
    monkeypatch.setattr(Admission, "_growth_bytes", lambda *_: 0)
    one = slot_bytes(28, name)
    limit = 20 * one - 1
    made = Watched(limit, name=name, slots_max=HELD).machine
    for seed in range(24):
        made.submit(ids(20, seed), 8)
    with mx.stream(generation_stream):
        assert not list(made.scheduler.give_slots())
    assert made.scheduler.running >= 17 and made.scheduler.running * one <= limit
    made.run()


def test_the_rows_of_a_slot_are_allocated_when_it_is_given() -> None:
    made = machine_of()
    nbytes = made.layers.slot_bytes(3_000, None)
    made.submit(ids(2_900), 50)
    made.submit(ids(2_900, 1), 50)
    gc.collect()  # what other tests left is not to go meanwhile
    before = mx.get_active_memory()
    made.step()  # reads a chunk of one of them
    assert mx.get_active_memory() - before >= 1.9 * nbytes


def test_the_wait_that_is_told_knows_that_memory_is_short() -> None:
    made = machine_of(limit_tokens=2_000)
    for seed in range(12):
        made.submit(ids(400, seed), 3)
    made.step()
    load = made.scheduler.load(0)
    assert load.running < 6 and len(load.queue) == 12 - load.running
    assert load.wait_s > 0, "there are places, but no memory"
    made.run()
    assert made.scheduler.load(0).wait_s == 0

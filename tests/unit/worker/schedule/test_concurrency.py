"""As many requests compute at once as have room: counted, not timed."""

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generation_stream

from hearth.shared.settings_from_env import load_settings
from hearth.shared.wire_messages import Progress
from hearth.worker.schedule import admission_and_disk_recall
from hearth.worker.schedule.admission_and_disk_recall import Admission
from hearth.worker.schedule.memory_guard import MemoryGuard
from hearth.worker.setup.kv_setup import live_slots_max, running_max
from scripts.harness.socketless_worker import Answer, Machine, machine
from tests.helpers.worker.scripted_scheduler import request, scheduler

DEFAULTS = load_settings({}, None)
HELD = live_slots_max(DEFAULTS)
RUNNING = running_max(DEFAULTS, is_batched=True)


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, count).tolist()


def held_bytes(made: Machine) -> int:
    keeper = made.keeper
    slots = sum(map(keeper.slot_bytes, keeper.slots))
    return int(keeper.store.budget.bytes_used + slots + made.scheduler.decoder.batch_bytes)


def machine_of(limit_tokens: int = 0, name: str = "qwen3", **more: Any) -> Machine:
    """Return a worker with the default counts, that may hold so many tokens of live caches."""
    rules = {"slots_max": HELD, "running_max": RUNNING} | more
    if not limit_tokens:
        return machine(name, tiny=True, **rules)
    limit = machine(name, tiny=True).layers.slot_bytes(limit_tokens, None)
    made: list[Machine] = []
    guard = MemoryGuard(lambda: limit, lambda: held_bytes(made[0]) if made else 0)
    made.append(machine(name, tiny=True, memory=guard, **rules))
    return made[0]


def run(made: Machine) -> int:
    """Compute until all is answered; return the most that ran at once."""
    most = 0
    while not made.scheduler.is_idle:
        made.step()
        most = max(most, made.scheduler.running)
    return most


@pytest.mark.parametrize("count", [16, 32])
def test_as_many_streams_as_fit_run_at_once_by_default(count: int) -> None:
    made = machine_of()
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


def test_where_memory_is_short_fewer_run_and_no_answer_ends_early_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_and_disk_recall, "SPARE_ROWS", 16)
    made = machine_of(limit_tokens=2_000)
    answers = [made.submit(ids(100, seed), 160) for seed in range(7)]
    most = run(made)
    assert 1 < most < 5
    assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [160] * 7
    assert not made.scheduler.counts["memory_ends"]
    made.check()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gpt_oss"])
def test_what_a_first_forward_will_allocate_is_promised_to_those_that_have_a_slot(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States and windows are not there before it, and rows are."""
    monkeypatch.setattr(Admission, "_growth_bytes", lambda *_: 0)
    one = machine(name, tiny=True).layers.slot_bytes(28, None)
    limit = 20 * one - 1
    guard = MemoryGuard(lambda: limit, lambda: held_bytes(made))
    made = machine(name, tiny=True, memory=guard, slots_max=HELD)
    for seed in range(24):
        made.submit(ids(20, seed), 8)
    with mx.stream(generation_stream):
        assert not list(made.scheduler.give_slots())
    assert made.scheduler.running >= 17 and made.scheduler.running * one <= limit
    made.run()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gpt_oss"])
def test_prompts_that_begin_together_are_counted_before_anything_of_them_is_read(
    name: str,
) -> None:
    made = machine_of(limit_tokens=2_500, name=name)
    limit = machine(name, tiny=True).layers.slot_bytes(2_500, None)
    for seed in range(10):
        made.submit(ids(200, seed), 4)
    while not made.scheduler.is_idle:
        made.step()
        assert held_bytes(made) <= 1.02 * limit, "but for what one step keeps"
    assert not made.scheduler.counts["memory_refusals"]


def test_the_rows_of_a_slot_are_allocated_when_it_is_given() -> None:
    made = machine_of()
    nbytes = made.layers.slot_bytes(3_000, None)
    made.submit(ids(2_900), 50)
    made.submit(ids(2_900, 1), 50)
    gc.collect()  # what other tests left is not to go meanwhile
    before = mx.get_active_memory()
    made.step()  # reads a chunk of one of them
    assert mx.get_active_memory() - before >= 1.9 * nbytes


def test_eight_long_answers_hold_nobody_up() -> None:
    made = machine_of()
    long = [made.submit(ids(40, seed), 200) for seed in range(8)]
    made.run(until=lambda: all(answer.request.sampled for answer in long))
    hi = made.submit(ids(9, 99), 4)
    made.run(until=lambda: bool(hi.reason))
    assert hi.reason == "length" and not any(answer.reason for answer in long)
    assert max(len(answer.request.sampled) for answer in long) < 30


def test_eight_agents_on_one_trunk_read_their_own_tokens_alone() -> None:
    made = machine_of()
    trunk = ids(640)
    made.ask([*trunk, 7], 1)
    prompts = [[*trunk, *ids(70, seed)] for seed in range(1, 9)]
    alone = machine_of()
    alone.ask([*trunk, 7], 1)
    own: list[Answer] = []
    forwards = {"together": 0, "alone": 0}
    for key, each in (("alone", alone), ("together", made)):
        watch_forwards(each, key, forwards)
    for prompt in prompts:
        own.append(alone.ask(prompt, 1))
    answers = [made.submit(prompt, 20) for prompt in prompts]
    made.run(until=lambda: all(answer.request.sampled for answer in answers))
    assert made.scheduler.running == 8, "the last has its first token before any has ended"
    made.run()
    told = [answer.prefilled for answer in answers]
    assert told == [answer.prefilled for answer in own] and max(told) <= 71
    assert forwards["together"] == forwards["alone"] > 0


def watch_forwards(made: Machine, key: str, forwards: dict[str, int]) -> None:
    prefill: Any = made.engine.prefill

    def counted(*given: Any) -> None:
        forwards[key] += 1
        prefill(*given)

    made.engine.prefill = counted  # type: ignore[method-assign]


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


def test_a_scheduler_of_scripts_gives_no_more_places_than_there_are() -> None:
    made, _ = scheduler(**{f"r{number}": [1] * 9 for number in range(40)})
    for number in range(40):
        assert isinstance(made.submit(request(f"r{number}")), Progress)
    while not made.is_idle:
        list(made.step())
        assert made.running <= made.report()["running_max"]

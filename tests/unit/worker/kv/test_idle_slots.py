"""Idle live caches have a part of memory of their own, and take nothing from kept KV."""

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from scripts.harness.socketless_worker import Machine, machine

TALKS = 6


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, count).tolist()


def idle_bytes(made: Machine) -> int:
    return sum(made.keeper.slot_bytes(s) for s in made.keeper.slots if not s.is_busy)


def share_out(made: Machine, kept_bytes: int, idle: int) -> None:
    with mx.stream(generation_stream):
        made.keeper.share_out(kept_bytes, idle)


def test_the_least_likely_idle_slot_makes_way_and_what_it_held_is_kept() -> None:
    made = machine("qwen3", tiny=True, slots_max=32)
    one = made.layers.slot_bytes(200 + 8, None)
    share_out(made, 64 * one, 2 * one)
    for seed in range(TALKS):
        made.ask(ids(200, seed))
        assert idle_bytes(made) <= 2 * one
    likely = [ids(200, seed) for seed in (0, TALKS - 1)]  # who the others may work for, the newest
    assert sorted(slot.tokens[:200].tolist() for slot in made.keeper.slots) == sorted(likely)
    assert made.keeper.evictions == 0 and made.keeper.counts["cut_outs_refused"] == 0
    for seed in range(TALKS):
        again = made.ask([*ids(200, seed), 7, 8, 9])
        assert again.cached >= 192, "each goes on from its last cut"
    made.check()


def test_one_idle_slot_stays_however_large_it_is() -> None:
    made = machine("qwen3", tiny=True, slots_max=32)
    share_out(made, 1 << 30, 0)
    first = made.ask(ids(300))
    second = made.ask([*ids(300), *first.tokens, 9, 9])
    assert second.usage is not None and second.request.source == "slot"
    assert len(made.keeper.slots) == 1


def test_idle_slots_push_no_kept_kv_out_of_a_worker_that_holds_many() -> None:
    made = machine("qwen3", tiny=True, slots_max=32)
    one = made.layers.slot_bytes(200 + 8, None)
    share_out(made, 64 * one, one)
    trunk = ids(150)
    answers = [made.submit([*trunk, *ids(50, seed)], 4) for seed in range(1, 9)]
    made.run()
    assert all(answer.reason == "length" for answer in answers)
    assert idle_bytes(made) <= one and made.keeper.evictions == 0
    kept = made.keeper.store.budget.bytes_used
    assert kept < 8 * one / 2, "what the eight shared is kept once"


def test_less_to_be_kept_is_held_to_at_once() -> None:
    made = machine("qwen3", tiny=True, slots_max=2)
    for seed in range(6):
        made.ask(ids(150, seed))
    budget = made.keeper.store.budget
    held = budget.bytes_used
    share_out(made, held // 2, 1 << 30)
    assert 0 < budget.bytes_used <= held // 2
    share_out(made, held, 0)
    assert len(made.keeper.slots) == 1, "the idle one that is surplus is emptied at once"
    assert made.ask(ids(150, 5)).cached > 0
    made.check()

"""Idle live caches have a part of memory of their own, and take nothing from kept KV."""

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from hearth.worker.cache.block_hash import pack, prefix_hashes
from hearth.worker.cache.prefix_search import PrefixQuery
from scripts.harness.socketless_worker import Machine, machine
from scripts.harness.store_builders import ROOT

TALKS = 6


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, count).tolist()


def idle_bytes(made: Machine) -> int:
    return sum(made.keeper.slot_bytes(s) for s in made.keeper.slots if not s.is_busy)


def share_out(made: Machine, kept_bytes: int, idle: int) -> None:
    with mx.stream(generation_stream):
        made.keeper.share_out(kept_bytes, idle)


def test_the_idle_slot_used_least_recently_makes_way_and_what_it_held_is_kept() -> None:
    made = machine("qwen3", tiny=True, slots_max=32)
    one = made.layers.slot_bytes(200 + 8, None)
    share_out(made, 64 * one, 2 * one)
    for seed in range(TALKS):
        made.ask(ids(200, seed))
        assert idle_bytes(made) <= 2 * one
    newest = [ids(200, seed) for seed in (TALKS - 2, TALKS - 1)]
    assert sorted(slot.tokens[:200].tolist() for slot in made.keeper.slots) == sorted(newest)
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


def query_of(made: Machine, prompt: list[int]) -> PrefixQuery:
    keys = pack(prompt)
    cuts = made.rule.cuts(keys)
    return PrefixQuery(keys, cuts, prefix_hashes(ROOT, keys, cuts))


def test_an_agent_amid_its_turns_keeps_its_live_cache_though_another_waits_for_it() -> None:
    made = machine("qwen3", tiny=True, slots_max=32)
    share_out(made, 1 << 30, 0)  # the one that is needed most stays
    waiting = ids(300)
    for _ in range(3):
        waiting = [*waiting, *made.ask(waiting).tokens, 9, 9]
    agent = ids(200, 1)
    restored = []
    for _ in range(4):
        answer = made.ask(agent)
        restored.append(answer.request.source)
        agent = [*agent, *answer.tokens, 9, 9]
    assert restored[2:] == ["slot", "slot"], "a copy of all its rows each turn otherwise"
    assert made.ask(waiting).cached >= 300, "what the other held is kept"
    made.check()


def test_an_idle_slot_that_holds_a_prompts_trunk_goes_and_the_trunk_stays() -> None:
    made = machine("qwen3", tiny=True, slots_max=32)
    trunk = ids(200)
    made.ask([*trunk, *ids(300, 1)])  # so much that nobody takes its slot back to the trunk
    branch = query_of(made, [*trunk, *ids(50, 2)])
    plan = made.keeper.plan(branch)
    assert plan.position >= 192 and plan.slot is None
    assert not any(extent.body for extent in plan.path), "the slot alone has the rows"
    held = idle_bytes(made) + made.keeper.store.budget.bytes_used
    with mx.stream(generation_stream):
        free = made.keeper.releasable(branch)
        made.keeper.release(1 << 40, branch)
    left = idle_bytes(made) + made.keeper.store.budget.bytes_used
    assert not made.keeper.slots and left > 0
    assert held - left >= free > 0, "as much as was said went"
    assert made.keeper.plan(branch).position == plan.position
    made.check()


def test_a_prompt_that_goes_on_in_a_slot_keeps_it() -> None:
    made = machine("qwen3", tiny=True, slots_max=32)
    first = made.ask(ids(200))
    other = made.ask(ids(150, 1))
    assert len(made.keeper.slots) == 2 and other.usage is not None
    line = query_of(made, [*ids(200), *first.tokens, 9, 9])
    own = made.keeper.plan(line).slot
    with mx.stream(generation_stream):
        made.keeper.release(1 << 40, line)
    assert own is not None and [slot.number for slot in made.keeper.slots] == [own]


def test_of_the_states_that_a_prompt_stands_on_the_last_one_is_spared() -> None:
    made = machine("qwen3_5", tiny=True, slots_max=32)
    first = made.ask(ids(400))
    share_out(made, 1 << 30, 0)
    made.ask(ids(60, 1))
    line = query_of(made, [*ids(400), *first.tokens, 9, 9])
    with mx.stream(generation_stream):
        for slot in made.keeper.slots:
            made.keeper.release_slot(slot)
        position = made.keeper.plan(line).position
        states = [node for node in made.keeper.store.nodes if node.snapshot is not None]
        assert len(states) > 3 and position >= 400
        made.keeper.release(1 << 40, line)
    left = [node for node in made.keeper.store.nodes if node.snapshot is not None]
    assert [node.position for node in left] == [position], "the others only serve edits"
    assert not any(node.snapshot_pinned for node in left), "and may go for another"
    assert made.keeper.plan(line).position == position
    made.check()


def test_of_windows_all_that_a_prompt_looks_back_to_are_spared() -> None:
    """The last window alone reaches back no further than its run."""
    made = machine("gpt_oss", tiny=True, slots_max=32, chunk=16)
    window = made.layers.layout.window
    first = made.ask(ids(200))
    line = query_of(made, [*ids(200), *first.tokens, 9, 9])
    with mx.stream(generation_stream):
        for slot in made.keeper.slots:
            made.keeper.release_slot(slot)
        path = made.keeper.plan(line).path
        position = path[-1].end.position
        near = [extent for extent in path if extent.end.position > position - window]
        assert position >= 192 and 1 < len(near) < len(path)
        made.keeper.release(1 << 40, line)
    assert [e for e in made.keeper.store.extents if e.window is not None] == near
    assert made.keeper.plan(line).position == position
    made.check()

"""Checks that answers which fit are written whole: what is held is asked for before it is held."""

from collections.abc import Callable
from typing import Any

import pytest

from hearth.worker.cache.block_hash import pack, prefix_hashes
from hearth.worker.engine.decode.batch_split import ReadCost
from hearth.worker.schedule.memory_guard import MemoryGuard
from scripts.harness.socketless_worker import Answer, Machine, machine
from tests.helpers.worker.watched_memory import Watched, ids, slot_bytes

ROW = slot_bytes(2_560) // 2_560


class Roomy:
    """A worker whose limit can be moved, with all that it holds counted: batches too."""

    def __init__(
        self, forward: Callable[[int], int] = lambda _depth: 0, limit: int = 1 << 60, **more: Any
    ) -> None:
        self.limit, self.peak, self._is_made = limit, 0, False
        guard = MemoryGuard(lambda: self.limit, self.held, forward)
        self.machine: Machine = machine("qwen3", tiny=True, slots_max=8, memory=guard, **more)
        self._is_made = True
        decoder = self.machine.engine.decoder
        decoder.cost = ReadCost(1e9, row_bytes=ROW)  # weights weigh more than padding
        step = decoder.step

        def watched() -> Any:
            sampled = step()
            self.peak = max(self.peak, self.held())
            return sampled

        decoder.step = watched

    def held(self) -> int:
        if not self._is_made:
            return 0
        keeper = self.machine.keeper
        slots = sum(map(keeper.slot_bytes, keeper.slots))
        return int(
            keeper.store.budget.bytes_used + slots + self.machine.scheduler.decoder.batch_bytes
        )

    def written(self, answers: list[Answer]) -> list[int]:
        self.machine.run()
        return [each.usage.completion_tokens if each.usage else 0 for each in answers]


@pytest.mark.parametrize(("fits", "prompt"), [(5_000, 4_000), (8_000, 7_000)])
def test_a_lone_answer_that_fits_is_written_whole(fits: int, prompt: int) -> None:
    """Its cache grew by a quarter at once, past the limit, and it was ended for that."""
    watched = Watched(slot_bytes(fits))
    answer = watched.machine.submit(ids(prompt), tokens_max=900)
    watched.machine.run()
    assert answer.usage is not None and answer.usage.completion_tokens == 900
    assert not watched.machine.scheduler.counts["memory_ends"]


@pytest.mark.parametrize(
    ("limit", "first", "others"),
    [(6_000, 2_500, [500]), (8_000, 3_000, [1_000]), (8_000, 3_000, [400] * 3)],
)
def test_joining_a_batch_ends_no_answer(limit: int, first: int, others: list[int]) -> None:
    """Who joins has its prompt copied into kept KV, which cannot go while it runs."""
    budget_mb = limit * ROW / 2 / (1 << 20)
    worker = Roomy(limit=limit * ROW, budget_mb=budget_mb)
    answers = [worker.machine.submit(ids(first, 1), tokens_max=200)]
    worker.machine.run(until=lambda: answers[0].request.completion_tokens > 2)
    answers += [
        worker.machine.submit(ids(count, 2 + number), tokens_max=100)
        for number, count in enumerate(others)
    ]
    assert worker.written(answers) == [200] + [100] * len(others)
    assert worker.peak <= worker.limit


@pytest.mark.parametrize("spare", [1_280, 2_304, 3_328])
def test_padding_leaves_room_for_the_forward_of_a_prompt(spare: int) -> None:
    def forward(depth: int) -> int:
        return ROW * depth // 2

    worker = Roomy(forward, chunk=64, budget_mb=0.001)
    worker.limit = slot_bytes(2_304) + 2 * slot_bytes(4_352) + forward(4_000) + slot_bytes(spare)
    first = worker.machine.submit(ids(2_000, 1), tokens_max=400)
    worker.machine.run(until=lambda: first.request.completion_tokens > 2)
    read = worker.machine.submit(ids(4_000, 2), tokens_max=10)
    worker.machine.run(until=lambda: read.request.position >= 128)
    short = [worker.machine.submit(ids(60, 3 + number), tokens_max=60) for number in range(7)]
    assert worker.written([first, read, *short]) == [400, 10] + [60] * 7


def test_answers_on_a_trunk_that_end_in_one_step_stay_within_the_limit() -> None:
    """Each takes the trunk along into its slot, where it stood on one that was held once."""
    worker = Roomy(limit=14_000 * ROW, chunk=512)
    keeper = worker.machine.keeper
    keeper.idle_bytes_max = 7_000 * ROW
    close = keeper.close

    def watched(*given: Any, **more: Any) -> None:
        close(*given, **more)
        worker.peak = max(worker.peak, worker.held())

    keeper.close = watched
    common = ids(2_000, 1)
    answers = [worker.machine.submit([*common, *ids(20, 5 + n)], tokens_max=100) for n in range(8)]
    worker.machine.run(until=lambda: len(worker.machine.engine.decoder.trunks) > 4)
    assert worker.written(answers) == [100] * 8
    assert worker.peak <= worker.limit, f"{(worker.peak - worker.limit) // ROW} tokens over it"


def test_who_shares_a_trunk_is_let_in_where_its_own_tokens_fit() -> None:
    """Each was asked for the trunk twice: of eight agents that fit two ran at a time."""
    worker = Roomy(limit=24_000 * ROW, chunk=512)
    common = ids(6_000, 1)
    answers = [worker.machine.submit([*common, *ids(20, 5 + n)], tokens_max=100) for n in range(8)]
    worker.machine.run(until=lambda: len(worker.machine.engine.decoder.trunks) == 8)
    assert not any(answer.usage for answer in answers), "all are written at once"
    assert worker.written(answers) == [100] * 8
    assert worker.peak <= worker.limit


def test_who_shares_no_trunk_is_asked_for_all_of_its_kv_twice() -> None:
    worker = Roomy(limit=24_000 * ROW, chunk=512)
    answers = [worker.machine.submit(ids(6_020, 5 + n), tokens_max=100) for n in range(4)]
    worker.machine.run(until=lambda: answers[0].request.completion_tokens > 2)
    for _ in range(40):
        worker.machine.step()
    assert sum(answer.request.slot is not None for answer in answers) < 3
    assert worker.written(answers) == [100] * 4
    assert worker.peak <= worker.limit


def test_kept_kv_stays_where_it_would_let_nobody_begin() -> None:
    """What running answers stand on was counted as if it could go, and another's went for it."""
    worker = Roomy()
    warm = worker.machine
    other = ids(800, 77)
    warm.ask(other, tokens_max=2)
    running = [warm.submit(ids(1_500, seed), tokens_max=300) for seed in (1, 2)]
    warm.run(until=lambda: running[1].request.completion_tokens > 3)
    for slot in list(warm.keeper.slots):
        if not slot.is_busy:
            warm.keeper.transfer.copy_out(slot, ())
            warm.keeper.give_up(slot)
    assert warm.engine.decoder.batch_keys, "both are in a batch"
    worker.limit = worker.held() + 300 * ROW
    waiting = warm.submit(ids(1_800, 3), tokens_max=10)
    for _ in range(20):
        warm.step()
    assert waiting.request.slot is None
    cuts = warm.rule.cuts([*other, 9, 9])
    ends = [cut for cut in cuts if cut <= 799]
    names = prefix_hashes(warm.keeper.store.root.name, pack(other), ends)
    assert all(warm.keeper.store.joint(name) is not None for name in names)
    warm.run()
    assert waiting.usage is not None and waiting.usage.completion_tokens == 10


def test_where_nothing_batches_a_prompt_needs_its_own_slot_only() -> None:
    """Twice as much was asked for, as a batch copies: two that fit ran one after the other."""
    watched = Watched(slot_bytes(5_000), is_exact=True, slots_max=4)
    first = watched.machine.submit(ids(1_500, 1), tokens_max=100)
    watched.machine.run(until=lambda: first.request.completion_tokens > 2)
    second = watched.machine.submit(ids(1_500, 2), tokens_max=100)
    watched.machine.run(until=lambda: second.request.slot is not None)
    assert first.request.completion_tokens < 10

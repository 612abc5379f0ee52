"""The memory guard: kept KV makes way, then others wait, then what cannot fit is refused."""

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from hearth.shared.wire_messages import Failed, Finished
from hearth.worker.cache.block_hash import pack, prefix_hashes
from hearth.worker.schedule.memory_guard import MemoryGuard
from scripts.harness.socketless_worker import machine
from scripts.harness.vision_worker import LookingMachine, shown
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.worker.watched_memory import Watched, held_bytes, ids, slot_bytes


def test_the_estimate_is_what_a_slot_takes() -> None:
    plain = machine("qwen3", tiny=True)
    for count in (100, 300, 1_000):
        answer = plain.submit(ids(count, seed=count), tokens_max=4)
        estimate = plain.keeper.slot_cost(answer.request.query, count + 4)
        plain.run(until=lambda: bool(plain.keeper.slots))
        (slot,) = [slot for slot in plain.keeper.slots if slot.is_busy]
        assert plain.keeper.slot_bytes(slot) == estimate
        plain.run()
        assert plain.keeper.slot_cost(answer.request.query, count + 4) == 0
        plain.scheduler.forget()


def test_a_prompt_waits_for_room_that_a_running_one_will_give_back() -> None:
    watched = Watched(slot_bytes(1_500))
    first = watched.machine.submit(ids(900), tokens_max=30)
    watched.machine.run(until=lambda: first.request.completion_tokens > 2)
    second = watched.machine.submit(ids(900, seed=1), tokens_max=30)
    for _ in range(5):
        watched.machine.step()
    assert second.request.slot is None and not first.reason
    watched.machine.run()
    assert first.reason == second.reason == "length"
    assert second.usage is not None and second.usage.completion_tokens == 30


def test_a_prompt_that_cannot_fit_is_refused_with_the_figures_and_the_next_is_served() -> None:
    watched = Watched(slot_bytes(1_000))
    answer = watched.machine.submit(ids(3_000))
    events = []
    while not watched.machine.scheduler.is_idle:
        events += watched.machine.step()
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.request_id == answer.request.request_id
    assert (failed.status, failed.code) == (400, "context_length_exceeded")
    for part in ("3,000 tokens", "GB", "KV_BITS", "MEMORY_LIMIT_MB"):
        assert part in failed.text
    assert watched.machine.ask(ids(400)).reason == "length"
    assert watched.machine.scheduler.counts["memory_refusals"] == 1


def test_an_answer_that_outgrows_the_memory_ends_with_what_it_has() -> None:
    watched = Watched(slot_bytes(1_000))
    long = watched.machine.submit(ids(400), tokens_max=2_000)
    watched.machine.run()
    assert long.reason == "length" and 500 < long.usage.completion_tokens < 1_000  # type: ignore[union-attr]
    assert watched.machine.scheduler.counts["memory_ends"] == 1
    assert watched.machine.ask(ids(300, seed=3)).reason == "length"


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(20, 900), st.integers(0, 3)), min_size=1, max_size=6))
@example([(375, 0), (145, 1), (146, 0), (20, 0)])  # two ends in steps that follow each other
def test_whatever_is_asked_is_answered_once_and_no_more_is_held_than_allowed(
    asked: list[tuple[int, int]],
) -> None:
    watched = Watched(slot_bytes(1_000))
    answers = [watched.machine.submit(ids(count, seed), 3) for count, seed in asked]
    events = []
    while not watched.machine.scheduler.is_idle:
        events += watched.machine.step()
    ends = [event.request_id for event in events if isinstance(event, Finished | Failed)]
    assert watched.peak <= watched.limit, "what an end took too much is given back"
    assert sorted(ends) == sorted(answer.request.request_id for answer in answers)
    watched.machine.check()


def test_encoded_images_make_way_before_a_prompt_is_refused() -> None:
    def held() -> int:
        return held_bytes(watched) + vision.nbytes

    asked = [*range(300, 330), *shown("qwen3_vl", 3), *range(400, 420)]
    plain = LookingMachine("qwen3_vl")
    limit = plain.layers.slot_bytes(700, None)
    watched = LookingMachine("qwen3_vl", memory=MemoryGuard(lambda: limit, held))
    vision = watched.engine.vision
    assert vision is not None
    watched.ask(asked)
    assert vision.nbytes > 0
    assert watched.ask(ids(600), tokens_max=100).reason == "length"
    assert vision.nbytes == 0 and not watched.scheduler.counts["memory_refusals"]
    same_tokens(watched.ask(asked), plain.ask(asked))


def test_encoded_images_go_before_any_kept_kv() -> None:
    made = LookingMachine("qwen3_vl")
    vision, store = made.engine.vision, made.keeper.store
    assert vision is not None
    made.ask([*range(300, 330), *shown("qwen3_vl", 3), *range(400, 420)])
    for slot in made.keeper.slots:
        made.keeper.release_slot(slot)
    kept = store.budget.bytes_used
    assert kept > 0 and vision.nbytes > 0
    made.keeper.release(1)
    assert vision.nbytes == 0 and store.budget.bytes_used == kept


def test_images_that_a_prompt_is_amid_stay_whatever_memory_is_needed() -> None:
    """Else each chunk of them would have them encoded anew."""
    made = LookingMachine("qwen3_vl")
    vision = made.engine.vision
    assert vision is not None
    made.ask([*range(300, 330), *shown("qwen3_vl", 2)])
    other = vision.nbytes
    answer = made.submit([*range(300, 320), *shown("qwen3_vl", 3), *range(400, 420)])
    made.run(until=lambda: vision.nbytes > other)
    (run,) = answer.request.query.images
    assert answer.request.position < run.end, "they are encoded, and not read to their end"
    made.keeper.release(1 << 40)
    assert vision.is_encoded(run.image)
    made.run()
    assert answer.reason == "length"
    made.keeper.release(1 << 40)
    assert vision.nbytes == 0


# ---------------------------------------------------------------- answers that fit

ROW = slot_bytes(2_560) // 2_560


def test_a_lone_answer_that_fits_is_written_whole() -> None:
    """Its cache grew by a quarter at once, past the limit, and it was ended for that."""
    watched = Watched(slot_bytes(5_000))
    assert watched.written([watched.machine.submit(ids(4_000), tokens_max=900)]) == [900]
    assert not watched.machine.scheduler.counts["memory_ends"]


@pytest.mark.parametrize(
    ("limit", "first", "others"),
    [(6_000, 2_500, [500]), (8_000, 3_000, [1_000]), (8_000, 3_000, [400] * 3)],
)
def test_joining_a_batch_ends_no_answer(limit: int, first: int, others: list[int]) -> None:
    """Who joins has its prompt copied into kept KV, which cannot go while it runs."""
    budget_mb = limit * ROW / 2 / (1 << 20)
    worker = Watched(slots_max=8, limit=limit * ROW, budget_mb=budget_mb)
    answers = [worker.machine.submit(ids(first, 1), tokens_max=200)]
    worker.machine.run(until=lambda: answers[0].request.completion_tokens > 2)
    answers += [
        worker.machine.submit(ids(count, 2 + number), tokens_max=100)
        for number, count in enumerate(others)
    ]
    assert worker.written(answers) == [200] + [100] * len(others)
    assert worker.peak <= worker.limit


@pytest.mark.parametrize("spare", [1_280, 3_328])
def test_padding_leaves_room_for_the_forward_of_a_prompt(spare: int) -> None:
    def forward(depth: int) -> int:
        return ROW * depth // 2

    worker = Watched(forward=forward, slots_max=8, chunk=64, budget_mb=0.001)
    worker.limit = slot_bytes(2_304) + 2 * slot_bytes(4_352) + forward(4_000) + slot_bytes(spare)
    first = worker.machine.submit(ids(2_000, 1), tokens_max=400)
    worker.machine.run(until=lambda: first.request.completion_tokens > 2)
    read = worker.machine.submit(ids(4_000, 2), tokens_max=10)
    worker.machine.run(until=lambda: read.request.position >= 128)
    short = [worker.machine.submit(ids(60, 3 + number), tokens_max=60) for number in range(7)]
    assert worker.written([first, read, *short]) == [400, 10] + [60] * 7


def test_who_shares_a_trunk_is_let_in_where_its_own_tokens_fit_and_ends_within_the_limit() -> None:
    """Each was asked for the trunk twice; and each took it along into its slot at its end."""
    worker = Watched(limit=24_000 * ROW, slots_max=8, chunk=512)
    keeper = worker.machine.keeper
    keeper.idle_bytes_max = 12_000 * ROW
    close = keeper.close

    def watched(*given: Any, **more: Any) -> None:
        close(*given, **more)
        worker.peak = max(worker.peak, worker.held())

    keeper.close = watched
    common = ids(6_000, 1)
    answers = [worker.machine.submit([*common, *ids(20, 5 + n)], tokens_max=100) for n in range(8)]
    worker.machine.run(until=lambda: len(worker.machine.engine.decoder.trunks) == 8)
    assert not any(answer.usage for answer in answers), "all are written at once"
    assert worker.written(answers) == [100] * 8
    assert worker.peak <= worker.limit, f"{(worker.peak - worker.limit) // ROW} tokens over it"


def test_kept_kv_stays_where_it_would_let_nobody_begin() -> None:
    """What running answers stand on was counted as if it could go, and another's went for it."""
    worker = Watched(slots_max=8)
    warm = worker.machine
    other = ids(800, 77)
    warm.ask(other, tokens_max=2)
    running = [warm.submit(ids(1_500, seed), tokens_max=300) for seed in (1, 2)]
    warm.run(until=lambda: running[1].request.completion_tokens > 3)
    for slot in list(warm.keeper.slots):
        if not slot.is_busy:
            warm.keeper.release_slot(slot)
    assert warm.engine.decoder.batch_request_ids, "both are in a batch"
    worker.limit = worker.held() + 300 * ROW
    waiting = warm.submit(ids(1_800, 3), tokens_max=10)
    for _ in range(20):
        warm.step()
    assert waiting.request.slot is None
    cuts = warm.rule.cuts([*other, 9, 9])
    ends = [cut for cut in cuts if cut <= 799]
    names = prefix_hashes(warm.keeper.store.root.name, pack(other), ends)
    assert all(warm.keeper.store.node(name) is not None for name in names)
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

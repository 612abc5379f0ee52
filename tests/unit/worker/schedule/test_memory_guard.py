"""The memory guard: kept KV makes way, then others wait, then what cannot fit is refused."""

from hypothesis import HealthCheck, example, given, settings, strategies as st

from hearth.shared.wire_messages import Failed, Finished
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

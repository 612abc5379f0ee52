"""A prompt that is read before it is asked, and pinned: on real models, under pressure."""

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Failed, Prompt, Sampling, Submit, Usage
from hearth.worker.cache import conversation_priority, pinned_prompts as module
from hearth.worker.cache.extent_store import MB
from hearth.worker.cache.pinned_prompts import Pins
from hearth.worker.schedule.request_state import ClientLease, PrefillOnly
from hearth.worker.stream.answer_parts import AnswerParts
from scripts.harness.agent_worker import Desk
from scripts.harness.model_families import family
from scripts.harness.socketless_worker import Machine, machine
from scripts.harness.store_builders import keep, new_store, rows, text
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.worker.kv_prompts import KINDS, follow, message, prompt, words

ME, OTHER = "me", "another key"


@pytest.fixture(autouse=True)
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations that come after another do not count as its sub-agents."""
    monkeypatch.setattr(conversation_priority, "SPONSOR_WAIT_S", -1.0)


def prefill(warm: Machine, ids: list[int], pin_key: str | None = None, **how: Any) -> Usage:
    """Have a prompt read, and return what that cost."""
    answer = warm.ask(ids, prefill_only=PrefillOnly(pin_key), **how)
    assert answer.reason == "prefilled" and answer.usage is not None
    assert answer.usage.completion_tokens == 0 and not answer.logits
    return answer.usage


def refusal(warm: Machine, ids: list[int]) -> Failed:
    """Have a pin refused."""
    warm.submit(ids, prefill_only=PrefillOnly(ME))
    events = [event for _ in range(1000) if not warm.scheduler.is_idle for event in warm.step()]
    assert isinstance(events[-1], Failed)
    return events[-1]


def need_all(warm: Machine) -> None:
    """Have everything go that may."""
    for slot in warm.keeper.slots:
        warm.keeper.release_slot(slot)
    budget = warm.keeper.store.budget
    warm.keeper.transfer.evictor.make_room(budget.bytes_max, 1, math.inf, time.monotonic())
    warm.check()


def other_question(name: str, system: int, seed: int = 77) -> list[int]:
    """Return the prompt with that system message and another question."""
    head = prompt(name, system)[: -len(message(name, "assistant", []))]
    return head + message(name, "user", words(seed, 60)) + message(name, "assistant", [])


def small(name: str, **rules: Any) -> Machine:
    """A worker whose cache holds some three prompts of `pressed`."""
    trial = machine(name)
    prefill(trial, prompt(name, 150, 150), pin_key=ME)
    budget_mb = 3 * trial.keeper.pins.report()["pinned_bytes"] / MB
    return machine(name, slots_max=2, budget_mb=budget_mb, **rules)


# ---------------------------------------------------------------- a prefill


@pytest.mark.parametrize("name", KINDS)
def test_what_was_prefilled_is_found_and_the_answer_is_a_cold_ones(name: str) -> None:
    warm, ids = machine(name, is_exact=True), prompt(name, 150, 100)
    usage = prefill(warm, ids)
    limit = warm.rule.cuts(ids)[-1]
    assert (usage.cached_tokens, usage.prefilled_tokens) == (0, limit)
    assert prefill(warm, ids).cached_tokens == limit
    answer, cold = warm.ask(ids), machine(name, keeps=False, is_exact=True).ask(ids)
    assert answer.cached == limit
    for mine, theirs in zip(answer.logits, cold.logits, strict=True):
        assert np.array_equal(mine, theirs)
    system = len(message(name, "system", words(0, 150)))
    assert warm.ask(other_question(name, 150)).cached == system
    warm.check()


def test_a_prefill_says_nothing_and_leaves_no_turn(tmp_path: Any) -> None:
    """Yet its prompt holds the turns before it as they were sampled, as the next one's will."""
    desk = Desk("qwen3", family("qwen3"), tmp_path)
    asked = [{"role": "user", "content": "What is in the harbor?"}]
    desk.ask(desk.named(Prompt(asked)), AnswerParts("Let me think.", "Boats."))
    echo = [*asked, {"role": "assistant", "content": "Boats."}, {"role": "user", "content": "Ok"}]
    named, counts = desk.named(Prompt(echo)), desk.sessions.counters()
    lease = ClientLease("early", b"peer")
    lease.lease_until = float("inf")
    request = desk.builder.build(
        lease, Submit("early", named, Sampling(), prefill_only=True, pin=True)
    )
    early = desk.machine.enter(request)
    desk.machine.run()
    assert early.reason == "prefilled" and early.usage is not None
    assert desk.sessions.counters() == counts
    reply = desk.ask(named, AnswerParts("Hm.", "Fine."))
    assert reply.ids == request.ids and reply.divergence is None
    assert reply.cached == early.usage.cached_tokens + early.usage.prefilled_tokens


def test_a_request_that_comes_amid_the_prefill_of_its_prompt_takes_it_over() -> None:
    warm, ids = machine("qwen3"), prompt("qwen3", 300, 100)
    first = warm.submit(ids, prefill_only=PrefillOnly())
    warm.step()
    second = warm.submit(ids)
    warm.run()
    assert first.reason == "prefilled"
    assert warm.settled(second).cached == warm.rule.cuts(ids)[-1]


# ---------------------------------------------------------------- pins


@pytest.mark.parametrize("name", KINDS)
def test_a_pin_has_all_that_its_end_needs_though_there_was_no_room_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, ids = small(name), prompt(name, 150, 150)
    monkeypatch.setattr(warm.keeper.transfer, "has_room_at", lambda *_: False)
    prefill(warm, ids, pin_key=ME)
    monkeypatch.undo()
    need_all(warm)
    cold = machine(name, keeps=False).ask(ids)
    answer = warm.ask(ids)
    assert answer.cached == warm.rule.cuts(ids)[-1]
    same_tokens(answer, cold)


def test_pins_are_told_to_whom_they_belong() -> None:
    warm = machine("qwen3")
    ids = [prompt("qwen3", 150, 100), other_question("qwen3", 150)]
    for key, each in zip((ME, OTHER), ids, strict=True):
        prefill(warm, each, pin_key=key)
    mine = warm.keeper.pins.report(ME)["pins"]
    all_of_them = warm.keeper.pins.report()
    assert [row["tokens"] for row in mine] == [warm.rule.cuts(ids[0])[-1]]
    assert [row["id"] for row in all_of_them["pins"]] == ["r1", "r2"]
    sizes = [row["bytes"] for row in all_of_them["pins"]]
    assert max(sizes) < all_of_them["pinned_bytes"] < sum(sizes), "they share the system message"
    assert all_of_them["pinned_bytes_max"] == warm.keeper.store.budget.bytes_max // 2


@pytest.mark.parametrize("name", KINDS)
def test_pins_beyond_half_of_the_cache_are_refused_and_nothing_is_lost(name: str) -> None:
    warm = small(name)  # one prompt is a third of it
    ids, more = prompt(name, 150, 150), prompt(name, 150, 150, seed=3)
    prefill(warm, ids, pin_key=ME)
    warm.ask(prompt(name, 20, 20, seed=5))
    kept = {extent.end.name for extent in warm.keeper.store.extents}
    failed = refusal(warm, more)
    assert (failed.status, failed.code) == (409, "pins_full")
    assert "half of the cache" in failed.text and "CACHE_RAM_BUDGET_MB" in failed.text
    assert kept <= {extent.end.name for extent in warm.keeper.store.extents}
    assert len(warm.keeper.pins.report()["pins"]) == 1
    assert warm.ask(more).cached == warm.rule.cuts(more)[-1], "it was prefilled all the same"
    assert warm.ask(ids).cached == warm.rule.cuts(ids)[-1]
    warm.check()


def test_a_pin_of_a_conversation_outlives_what_would_replace_its_decoded_part() -> None:
    warm = machine("qwen3", slots_max=3)
    ids = prompt("qwen3", 150, 100)
    longer = follow("qwen3", ids, warm.ask(ids, 40).tokens, 30)
    prefill(warm, longer, pin_key=ME)
    rules = warm.keeper.rules
    warm.keeper.rules = replace(rules, is_exact=True)
    warm.work_ahead()  # makes the answer canonical
    warm.keeper.rules = rules
    assert warm.scheduler.idle_tokens > 0
    need_all(warm)
    (row,) = warm.keeper.pins.report()["pins"]
    assert row["tokens"] == warm.rule.cuts(longer)[-1]
    assert warm.ask(longer).cached == row["tokens"]
    assert warm.keeper.unpin(row["id"], ME)
    warm.check()


def test_nothing_can_be_pinned_where_nothing_is_kept() -> None:
    cold = machine("qwen3", keeps=False)
    assert refusal(cold, prompt("qwen3", 150, 100)).code == "not_kept"
    warm = machine("qwen3")
    assert refusal(warm, [5]).code == "not_kept", "one token is fed for its logits alone"


# ---------------------------------------------------------------- without arrays


@pytest.mark.parametrize("keys", [1, 2])  # each of which may have as many
def test_there_are_only_so_many_pins(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    monkeypatch.setattr(module, "PINS_MAX", 2 * keys)
    store = new_store()
    pins, path = Pins(store, keys), keep(store, text(1, 20), [10, 20])
    for name in ("a", "b", "b"):
        pins.check(name, ME, path, 0, 0)
        pins.add(name, ME, path)
    with pytest.raises(RequestError, match="2 pins"):
        pins.check("c", ME, path, 0, 0)


def test_what_is_lacking_counts_against_the_half() -> None:
    store = new_store(bytes_max=rows(40).nbytes)
    pins, path = Pins(store), keep(store, text(1, 10), [10])
    pins.check("a", ME, path, rows(10).nbytes, 0)
    with pytest.raises(RequestError) as caught:
        pins.check("a", ME, path, rows(10).nbytes + 1, 0)
    assert caught.value.status == 409
    buffers_max = store.budget.buffers_max
    with pytest.raises(RequestError, match="buffers"):
        pins.check("a", ME, path, 0, buffers_max // 2 - 1)

"""Checks on real models how much the KV manager reuses, and how much memory it takes.

Correctness against a cold run is tests/property/warm/test_warm_equals_cold.py; this is about how
much is reused, what it takes, and what happens to it.
"""

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, KVCache

from hearth.shared.settings import load_settings
from hearth.worker.cache.extent_store import MB
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.mlx_memory import working_bytes
from hearth.worker.kv.kv_manager import NullKVManager
from hearth.worker.kv.quantise_kv import QuantFormat
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from hearth.worker.setup.kv_setup import is_exact, make_kv_manager
from scripts.harness.socketless_worker import loaded, machine
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.by_day import by_day
from tests.helpers.worker.kv_prompts import KINDS, follow, kept_bytes, message, prompt, words

CUTS = CutRule(64, TurnMarks(frozenset(), ()))


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5", "gpt_oss")))
@pytest.mark.parametrize("messages", [1, 3])
def test_a_conversation_that_goes_on_prefills_what_is_new(name: str, messages: int) -> None:
    """In a tool loop at most 16 tokens beyond those that are new."""
    warm = machine(name)
    ids = prompt(name, 150, 100)
    for _ in range(4):
        answer = warm.ask(ids, 12)
        longer = follow(name, ids, answer.tokens, 30)
        for extra in range(messages - 1):
            head = longer[: -len(message(name, "assistant", []))]
            longer = head + message(name, "user", words(extra, 20)) + longer[len(head) :]
        new = len(longer) - len(ids) - len(answer.tokens)
        ids = longer
        assert warm.ask(ids, 1).prefilled <= new + 16
    assert warm.keeper.counts["match_prefix"] >= 4


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5", "gpt_oss")))
def test_branches_come_back_to_where_they_were(name: str) -> None:
    warm = machine(name, slots_max=2)
    trunk = prompt(name, 200, 100)
    answer = warm.ask(trunk, 8)
    branches = [follow(name, trunk, answer.tokens, 60, seed=n) for n in range(4)]
    for branch in branches:
        assert warm.ask(branch, 4).cached >= len(trunk)
    for branch in branches:
        assert warm.ask(branch, 4).prefilled <= len(message(name, "assistant", []))
    assert warm.ask(follow(name, trunk, answer.tokens, 30, seed=99), 4).cached >= len(trunk)


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5", "gpt_oss")))
@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("is_watchdog", [False, True], ids=["client left", "lease ran out"])
def test_a_cancelled_prefill_goes_on_where_it_stopped(
    name: str, share: float, is_watchdog: bool
) -> None:
    warm = machine(name)
    ids = prompt(name, 600, 200)
    leaving = warm.submit(ids)
    warm.step()
    while leaving.request.position < share * len(ids):
        warm.step()
    stopped = leaving.request.position
    if is_watchdog:
        leaving.request.lease.lease_until = 0.0
    else:
        leaving.request.lease.is_cancelled = True
    warm.run()
    assert leaving.reason == "cancelled"
    assert warm.ask(ids).cached >= stopped > 0, "not one chunk is prefilled again"


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5", "gpt_oss")))
def test_a_client_that_leaves_amid_an_answer_leaves_its_prompt_and_its_text(name: str) -> None:
    warm = machine(name)
    ids = prompt(name, 150, 100)
    leaving = warm.submit(ids, 100)
    warm.run(until=lambda: leaving.request.completion_tokens == 10)
    leaving.request.lease.is_cancelled = True
    warm.run()
    warm.settled(leaving)
    longer = follow(name, ids, leaving.tokens, 40)
    left = len(message(name, "assistant", []))
    assert warm.ask(longer).cached >= len(ids) - left
    assert warm.ask(ids).prefilled == left


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5", "gpt_oss")))
def test_two_sessions_that_take_turns_both_hit_and_take_no_more_memory(name: str) -> None:
    warm = machine(name, slots_max=2)
    talks = [prompt(name, 900, 300, seed=n) for n in (1, 2)]
    for ids in talks:
        warm.ask(ids, 1)
    used = []
    for _ in range(20):
        for ids in talks:
            answer = warm.ask(ids, 1)
            assert answer.cached / len(ids) > 0.98
        mx.clear_cache()
        used.append(mx.get_active_memory())
    assert max(used[5:]) <= used[4] * 1.01 + 100_000


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5", "gpt_oss")))
def test_one_trunk_with_eight_branches_is_kept_once(name: str) -> None:
    warm = machine(name, tiny=True, chunk=256)
    trunk = prompt(name, 2_000)[: -len(message(name, "assistant", []))]
    header = message(name, "assistant", [])
    tokens = len(trunk)
    for branch in range(8):
        ids = trunk + message(name, "user", words(branch, 500)) + header
        assert warm.ask(ids, 1).prefilled <= len(ids) - (tokens if branch else 0)
        tokens_kept = len(ids) - len(trunk)
    rows = warm.layers.row_bytes + warm.layers.window_bytes(1)
    states = sum(node.snapshot is not None for node in warm.keeper.store.nodes)
    allowed = (len(trunk) + 8 * (tokens_kept + 1)) * rows + states * warm.layers.state_bytes
    assert kept_bytes(warm) <= 1.1 * allowed


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5", "gpt_oss")))
def test_memory_stays_within_the_budget_and_the_live_slots(name: str) -> None:
    warm = machine(name, slots_max=2, budget_mb=2, chunk=256)
    mx.clear_cache()
    before = mx.get_active_memory()
    for seed in range(8):
        warm.ask(prompt(name, 700, 200, seed=seed), 2)
        assert kept_bytes(warm) <= 2 * MB
        slots = sum(warm.keeper.slot_bytes(slot) for slot in warm.keeper.slots)
        freed_and_held = mx.get_cache_memory()
        mx.clear_cache()
        assert mx.get_active_memory() - before <= 2 * MB + slots + 0.5 * MB
    assert freed_and_held <= working_bytes(mx.get_memory_limit()), "the rest goes back"
    assert len(warm.keeper.slots) == 2
    assert warm.keeper.evictions + warm.keeper.counts["cut_outs_refused"] > 0, "not all of it fits"


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5", "gpt_oss")))
def test_emptying_the_cache_gives_all_of_it_back(name: str) -> None:
    warm = machine(name)
    before = mx.get_active_memory()
    for seed in range(3):
        warm.ask(prompt(name, 300, 100, seed=seed), 2)
    warm.scheduler.forget()
    mx.clear_cache()
    assert kept_bytes(warm) == 0 and len(warm.keeper.store) == 0
    assert mx.get_active_memory() - before < 100_000
    assert warm.ask(prompt(name, 300, 100)).cached == 0


def test_a_session_idle_for_long_gives_up_its_slot_and_not_what_it_held() -> None:
    warm = machine("qwen3", session_idle_s=100.0)
    ids = prompt("qwen3", 300, 100)
    warm.ask(ids)
    assert not warm.keeper.sweep() and len(warm.keeper.slots) == 1
    warm.keeper.slots[0].used_at -= 200
    assert warm.keeper.sweep() and len(warm.keeper.slots) == 0
    again = warm.ask(ids)
    assert again.usage is not None and again.usage.source == "ram" and again.cached > 300


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5", "gpt_oss")))
def test_a_storm_of_sub_agents_leaves_its_orchestrator(name: str) -> None:
    warm = machine(name, slots_max=2, budget_mb=4, chunk=256)
    orchestrator = prompt(name, 400, 100)
    answer = warm.ask(orchestrator, 8)
    for seed in range(20):
        warm.ask(prompt(name, 150, 60, seed=100 + seed), 4)
    back = follow(name, orchestrator, answer.tokens, 30)
    new = len(back) - len(orchestrator) - len(answer.tokens)
    assert warm.keeper.evictions > 0, "the storm did not fit"
    assert warm.ask(back).prefilled <= new + 16


@pytest.mark.parametrize(
    ("name", "tiny", "length"),
    [
        ("qwen3", False, 3000),
        pytest.param("qwen3_5", False, 3000, marks=pytest.mark.night),
        ("gpt_oss", True, 30_000),
    ],
)
def test_a_decode_step_copies_no_kv(name: str, tiny: bool, length: int) -> None:
    warm = machine(name, tiny=tiny, chunk=256)
    ids = prompt(name, length)
    talking = warm.submit(ids, 40)
    warm.run(until=lambda: talking.request.completion_tokens == 5)
    live = sum(warm.keeper.slot_bytes(slot) for slot in warm.keeper.slots)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    warm.run(until=lambda: talking.request.completion_tokens == 15)
    assert mx.get_peak_memory() - before < live / 4
    warm.run()


def test_a_short_chat_reserves_nothing_for_a_long_one() -> None:
    warm = machine("qwen3")
    warm.ask(prompt("qwen3", 20, 10), 4)
    (slot,) = warm.keeper.slots
    assert slot.capacity <= 1024


def test_kept_kv_in_eight_bits_takes_half_and_short_prompts_stay_as_they_are() -> None:
    names: list[Any] = [None, QuantFormat(8, 64)]
    sizes, taken = [], []
    for form in names:
        warm = machine("qwen3", slots_max=1, store_format=form, store_from=256)
        gc.collect()  # what an earlier test left must not go meanwhile
        mx.clear_cache()
        before = mx.get_active_memory()
        warm.ask(prompt("qwen3", 500, 100), 2)
        warm.ask(prompt("qwen3", 20, 10, seed=4), 2)
        sizes.append(kept_bytes(warm))
        taken.append(mx.get_active_memory() - before)
    assert sizes[1] < 0.6 * sizes[0]
    assert taken[0] - taken[1] >= 0.9 * (sizes[0] - sizes[1]), "raw rows are not held beside them"
    short = [e for e in warm.keeper.store.extents if e.end.position < 256 and e.body is not None]
    assert short and all(e.body.layers[0].format is None for e in short)


class FakeEngine:
    """An engine whose model keeps something unknown."""

    vision = None

    def probe(self, tokens: int) -> list[Any]:
        known, odd = KVCache(), ConcatenateKVCache()
        for layer in (known, odd):
            layer.update_and_fetch(mx.zeros((1, 1, 3, 8)), mx.zeros((1, 1, 3, 8)))
        return [known, odd]

    def new_cache(self) -> list[Any]:
        return []


def test_an_unknown_cache_is_served_without_reuse_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keeper = make_kv_manager(
        FakeEngine(), loaded("qwen3"), load_settings({"MAX_KV_SIZE_GB": "0"}, None), CUTS
    )  # type: ignore[arg-type]
    assert isinstance(keeper, NullKVManager)
    assert [record.message for record in caplog.records] == [
        "no KV is reused: the model keeps ConcatenateKVCache, which cannot be restored"
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "quant", "expected"),
    [
        ("qwen3", "bfloat16", 4, False),
        ("qwen3_5", "bfloat16", None, False),
        ("glm4_moe_lite", "bfloat16", 4, True),
        ("glm4_moe_lite", "float32", None, False),
        ("falcon_h1", "bfloat16", None, True),
        ("falcon_h1", "float32", None, False),
    ],
)
def test_exact_is_the_default_where_reuse_would_show(
    name: str, dtype: str, quant: int | None, expected: bool
) -> None:
    assert is_exact(loaded(name, dtype, quant), load_settings({}, None)) is expected
    forced = load_settings({"CACHE_EXACT": "true"}, None)
    assert is_exact(loaded(name, dtype, quant), forced)


@pytest.mark.parametrize(
    ("name", "is_possible"),
    [
        *((name, False) for name in ("gpt_oss", "gemma3_text", "glm4_moe_lite", "falcon_h1")),
        *((name, True) for name in ("qwen3", "qwen3_5", "qwen3_next")),
    ],
)
def test_kv_that_upstream_cannot_quantise_refuses_to_start(name: str, is_possible: bool) -> None:
    engine = Engine(loaded(name))
    with engine.stream():
        reason = engine.why_not_quantised(8, 64)
    assert (reason is None) == is_possible
    assert "\n" not in (reason or "")


def test_kv_of_a_class_that_no_slot_quantises_refuses_though_upstream_could(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class RingSlidingKVCache(KVCache):
        pass

    engine = Engine(loaded("qwen3"))
    count = len(engine.new_cache())
    monkeypatch.setattr(engine, "new_cache", lambda: [RingSlidingKVCache() for _ in range(count)])
    with engine.stream():
        assert engine.why_not_quantised(8, 64) == "it keeps RingSlidingKVCache"


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5", "gpt_oss")))
@pytest.mark.parametrize("count", [1, 2], ids=["alone", "in a batch"])
def test_emptying_the_cache_amid_an_answer_leaves_no_wrong_state(name: str, count: int) -> None:
    """The slot is indexed anew when it is checked in; what it holds by then is of later tokens."""
    warm, cold = machine(name), machine(name, keeps=False)
    asked = [prompt(name, 150, 40 + number) for number in range(count)]
    running = [warm.submit(ids, 30) for ids in asked]
    warm.run(until=lambda: min(one.request.completion_tokens for one in running) > 5)
    warm.scheduler.forget()
    warm.run()
    warm.check()
    for one, ids in zip(running, asked, strict=True):
        expected = cold.ask(ids, 30)
        same_tokens(warm.settled(one), expected)
        again = warm.ask(ids, 30)
        same_tokens(again, expected)
        assert again.cached > 0 or warm.layers.layout.has_state or warm.layers.layout.window
        warm.check()


def test_packed_rows_are_priced_as_what_they_take() -> None:
    warm = machine(
        "qwen3", slots_max=1, budget_mb=1.6, store_format=QuantFormat(4, 64), store_from=0
    )
    cached = []
    for seed in range(4):
        warm.ask(prompt("qwen3", 400, 100, seed=seed), 2)
    for seed in reversed(range(4)):
        cached.append(warm.ask(prompt("qwen3", 400, 100, seed=seed), 1).cached)
    assert warm.keeper.counts["cut_outs_refused"] == 0
    assert min(cached) > 400, "four conversations fit, packed"

"""Random conversations, warm against cold: what the cache is for, and the only proof that counts.

Exact mode must give the very bits of a cold cache; default mode the same greedy tokens, unless the
cold run itself could not tell its two best tokens apart.
"""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.worker.kv.quantise_kv import QuantFormat
from hearth.worker.schedule.answer_drafts import DraftPolicy
from scripts.fixtures.fixture_cache import TEXT_NAMES
from scripts.harness.slow_properties import slow
from scripts.harness.socketless_worker import machine
from scripts.harness.warm.warm_talks import AUTUMN_NAMES, KINDS, OPERATIONS, Talk, play
from tests.helpers.by_day import by_day
from tests.helpers.models.oracle_drafts import OracleDrafts


@pytest.fixture(scope="module", params=by_day(TEXT_NAMES, KINDS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=by_day(TEXT_NAMES, ("qwen3_5", "gpt_oss", "deepseek_v32")))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    scope="module", params=by_day(AUTUMN_NAMES, ("mlx_vlm/deepseek_v4", "mlx_vlm/glm5_next"))
)
def autumn(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@slow(3)
@given(operations=OPERATIONS)
def test_in_exact_mode_warm_is_cold_to_the_bit(
    name: str, operations: list[tuple[str, int]]
) -> None:
    warm = machine(name, is_exact=True)
    cold = machine(name, keeps=False, is_exact=True)
    play(Talk(name, warm, cold), operations, is_exact=True)


@slow(3)
@given(operations=OPERATIONS, slots=st.integers(1, 4), budget_kb=st.sampled_from([0, 400, 500_000]))
def test_with_layers_that_choose_tokens_warm_is_cold_to_the_bit(
    autumn: str, operations: list[tuple[str, int]], slots: int, budget_kb: int
) -> None:
    """These models are in exact mode by default."""
    warm = machine(autumn, is_exact=True, slots_max=slots, budget_mb=budget_kb / 1024)
    cold = machine(autumn, keeps=False, is_exact=True)
    is_ample = slots == 4 and budget_kb > 400
    play(Talk(autumn, warm, cold), operations, is_exact=True, is_ample=is_ample)


@slow(3)
@given(operations=OPERATIONS)
def test_by_default_warm_says_what_cold_says(name: str, operations: list[tuple[str, int]]) -> None:
    warm, cold = machine(name), machine(name, keeps=False)
    play(Talk(name, warm, cold), operations, is_exact=False)


@slow(2)
@given(
    operations=OPERATIONS,
    lies=st.sampled_from([0.0, 0.25]),
    lengths=st.sampled_from([[4], [7, 0, 1], [3, 5, 0]]),
)
def test_with_drafts_right_and_wrong_warm_says_what_cold_says_and_reads_nothing_twice(
    name: str, operations: list[tuple[str, int]], lies: float, lengths: list[int]
) -> None:
    cold = machine(name, keeps=False)
    cold.drafts.policy = DraftPolicy()
    drafts = OracleDrafts(lambda ids: talk.expected(ids).tokens, lies, lengths)
    talk = Talk(name, machine(name, drafts=drafts), cold)
    play(talk, operations, is_exact=False)
    assert drafts.accepted > 0


@slow(2)
@given(operations=OPERATIONS, slots=st.integers(1, 3), budget_kb=st.sampled_from([0, 400, 1500]))
def test_with_hardly_any_room_warm_is_still_cold_to_the_bit(
    kind: str, operations: list[tuple[str, int]], slots: int, budget_kb: int
) -> None:
    warm = machine(kind, is_exact=True, slots_max=slots, budget_mb=budget_kb / 1024)
    cold = machine(kind, keeps=False, is_exact=True)
    play(Talk(kind, warm, cold), operations, is_exact=True, is_ample=False)


@slow(2)
@given(operations=OPERATIONS, slots=st.integers(1, 3), budget_kb=st.sampled_from([0, 400, 1500]))
def test_with_hardly_any_room_warm_still_says_what_cold_says(
    kind: str, operations: list[tuple[str, int]], slots: int, budget_kb: int
) -> None:
    warm = machine(kind, slots_max=slots, budget_mb=budget_kb / 1024)
    cold = machine(kind, keeps=False)
    play(Talk(kind, warm, cold), operations, is_exact=False, is_ample=False)


@pytest.mark.parametrize("quantised", ["qwen3", "llama", "qwen3_moe", "qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("bits", [8, 4])
@slow(2)
@given(
    operations=OPERATIONS,
    start=st.sampled_from([0, 100, 200]),
    budget_kb=st.sampled_from([700, 10**6]),
)
def test_with_quantised_kv_warm_is_a_quantised_cold_to_the_bit(
    quantised: str, bits: int, operations: list[tuple[str, int]], start: int, budget_kb: int
) -> None:
    rules: dict[str, Any] = {"is_exact": True, "running_from": start}
    rules["running_format"] = QuantFormat(bits, 64)
    warm = machine(quantised, budget_mb=budget_kb / 1024, slots_max=2, **rules)
    cold = machine(quantised, **rules)
    is_ample = budget_kb > 700
    play(Talk(quantised, warm, cold), operations, is_exact=True, is_ample=is_ample)


@slow(1)
@given(operations=OPERATIONS)
def test_with_kv_stored_in_eight_bits_everything_still_goes_on(
    kind: str, operations: list[tuple[str, int]]
) -> None:
    """What it says may differ from a cold run: random weights are chaotic."""
    warm = machine(kind, slots_max=2, store_format=QuantFormat(8, 64), store_from=100)
    talk = Talk(kind, warm, warm)
    talk.compare = lambda answer, ids, is_exact: None  # type: ignore[method-assign]
    play(talk, operations, is_exact=False)


@slow(2)
@given(operations=OPERATIONS)
def test_what_default_mode_calls_canonical_is_what_a_cold_prefill_writes(
    kind: str, operations: list[tuple[str, int]]
) -> None:
    """Fast KV passes for canonical nowhere: all that is kept is put to exact mode's test."""
    warm = machine(kind)
    cold = machine(kind, keeps=False, is_exact=True)
    talk = Talk(kind, warm, cold)
    play(talk, operations, is_exact=False)
    warm.work_ahead()
    warm.keeper.rules = dataclasses.replace(warm.keeper.rules, is_exact=True)
    warm.drafts.policy = DraftPolicy()  # exact mode drafts nothing
    for ids in talk.prompts:
        talk.ask(ids, is_exact=True)

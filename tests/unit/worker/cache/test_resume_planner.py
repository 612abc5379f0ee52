"""Checks where a request resumes, at stored extents or a live slot, and its kind of match."""

from typing import Any

import pytest

from hearth.worker.cache.block_hash import pack
from hearth.worker.cache.extent_store import ExtentStore
from hearth.worker.cache.prefix_search import KINDS, ResumePlan, SlotView, make_plan
from scripts.harness.store_builders import HYBRID, WINDOWED, Part, ask, keep, new_store, text
from tests.helpers.cases import cases

CUTS = [10, 20, 30]


def plan_of(
    store: ExtentStore,
    tokens: list[int],
    cuts: list[int],
    slots: list[SlotView] | None = None,
    is_exact: bool = False,
) -> ResumePlan:
    plan = make_plan(store, slots or [], ask(tokens, cuts), is_exact)
    assert plan.kind in KINDS and 0 <= plan.position <= (cuts[-1] if cuts else 0)
    return plan


def text_of(parts: list[tuple[int, int]]) -> list[int]:
    return [token for seed, length in parts for token in text(seed, length)]


def keep_prompt(store: ExtentStore, prompt: dict[str, Any]) -> None:
    end = keep(store, text_of(prompt.get("text", [(1, 31)])), prompt.get("cuts", CUTS))[-1].end
    end.is_prompt_end = True
    if "answer" in prompt:
        answer = prompt["answer"]
        keep(store, text(1, answer), [answer], is_canonical=False, start=end)


def slot(number: int, tokens: list[int], canonical_cuts: list[int], floor: int = 0) -> SlotView:
    return SlotView(number, pack(tokens), tuple(canonical_cuts), floor)


@pytest.mark.parametrize("case", cases("cache/resume_plans.yaml"))
def test_a_prompt_goes_on_where_it_computes_least(case: dict[str, Any]) -> None:
    store = new_store()
    for prompt in case.get("kept", [{}]):
        keep_prompt(store, prompt)
    slots = [
        slot(row["number"], text_of(row["text"]), row["cuts"], row.get("floor", 0))
        for row in case.get("slots", [])
    ]
    for order in (slots, slots[::-1]):
        plan = plan_of(
            store, text_of(case["prompt"]), case["cuts"], order, case.get("is_exact", False)
        )
        told = {name: getattr(plan, name) for name in case["plan"]}
        if "path" in told:
            told["path"] = [extent.end.position for extent in plan.path]
        assert told == case["plan"]


# ---------------------------------------------------------------- states and windows


def test_a_prompt_that_a_lost_state_makes_resume_earlier_is_counted() -> None:
    store = new_store(HYBRID)
    kept = keep(store, text(1, 31), CUTS)
    tokens, cuts = text(1, 50), [*CUTS, 49]
    assert not plan_of(store, tokens, cuts).hybrid_trimmed
    store.set_snapshot(kept[2].end, None)
    plan = plan_of(store, tokens, cuts)
    assert (plan.position, plan.matched, plan.hybrid_trimmed) == (20, 30, True)
    assert plan.path[-1] is kept[1]


def test_a_slot_makes_up_for_a_lost_state() -> None:
    store = new_store(HYBRID)
    kept = keep(store, text(1, 31), CUTS)
    store.set_snapshot(kept[2].end, None)
    plan = plan_of(store, text(1, 50), [*CUTS, 49], [slot(1, text(1, 30), CUTS)])
    assert (plan.slot, plan.position, plan.hybrid_trimmed) == (1, 30, False)
    assert not plan.path, "what it holds needs no state from elsewhere"


def test_a_slot_is_rewound_with_the_state_of_where_it_goes_back_to() -> None:
    store = new_store(HYBRID)
    kept = keep(store, text(1, 31), CUTS)
    idle = slot(1, text(1, 30) + text(5, 8), CUTS)
    plan = plan_of(store, text(1, 30) + text(6, 20), [*CUTS, 49], [idle])
    assert (plan.slot, plan.position) == (1, 30)
    assert plan.path[-1] is kept[2]


def test_a_lost_window_makes_a_prompt_resume_earlier_too() -> None:
    store = new_store(WINDOWED)
    kept = keep(store, text(1, 31), CUTS)
    store.set_window(kept[2], Part(1), 29)
    plan = plan_of(store, text(1, 50), [*CUTS, 49])
    assert (plan.position, plan.hybrid_trimmed) == (20, True)

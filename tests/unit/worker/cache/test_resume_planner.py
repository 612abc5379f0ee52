"""Checks where a request resumes, at stored extents or a live slot, and its kind of match."""

import pytest

from hearth.worker.cache.block_hash import pack
from hearth.worker.cache.extent_store import ExtentStore
from hearth.worker.cache.resume_planner import KINDS, ResumePlan, SlotView, make_plan
from scripts.harness.store_builders import HYBRID, WINDOWED, Part, ask, keep, new_store, text

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


def slot(number: int, tokens: list[int], canonical_cuts: list[int], floor: int = 0) -> SlotView:
    return SlotView(number, pack(tokens), tuple(canonical_cuts), floor)


def store_of(length: int = 31, cuts: list[int] = CUTS) -> ExtentStore:
    """Return a store after one prompt that ended at the last of `cuts`."""
    store = new_store()
    keep(store, text(1, length), cuts)[-1].end.is_prompt_end = True
    return store


# ---------------------------------------------------------------- kinds


def test_a_prompt_asked_again_is_exact_and_only_its_tail_is_computed() -> None:
    plan = plan_of(store_of(), text(1, 31), CUTS)
    assert (plan.kind, plan.position, plan.source) == ("exact", 30, "ram")
    assert plan.is_canonical and not plan.hybrid_trimmed


def test_a_prompt_that_extends_another_has_a_prefix() -> None:
    plan = plan_of(store_of(), text(1, 50), [*CUTS, 40, 49])
    assert (plan.kind, plan.position, plan.matched) == ("prefix", 30, 30)


def test_a_prompt_shorter_than_what_is_kept_is_a_supersequence_match() -> None:
    plan = plan_of(store_of(), text(1, 23), [10, 20, 22])
    assert (plan.kind, plan.position, plan.matched) == ("supersequence", 20, 23)


def test_a_cut_of_a_longer_prompt_is_not_a_prompt_asked_again() -> None:
    plan = plan_of(store_of(), text(1, 21), [10, 20])
    assert (plan.kind, plan.position) == ("supersequence", 20)


def test_a_prompt_that_parts_from_what_is_kept_shares_a_prefix_with_it() -> None:
    plan = plan_of(store_of(), text(1, 24) + text(9, 10), [10, 20, 33])
    assert (plan.kind, plan.position, plan.matched) == ("lcp", 20, 24)


def test_no_shared_prefix_is_a_miss() -> None:
    plan = plan_of(store_of(), text(2, 31), CUTS)
    assert (plan.kind, plan.position, plan.path, plan.source) == ("miss", 0, (), "none")
    assert plan.is_canonical, "what it prefills from the start is canonical"


def test_a_match_shorter_than_the_first_cut_is_a_miss_that_tells_how_far() -> None:
    plan = plan_of(store_of(), text(1, 7) + text(9, 20), [10, 20, 26])
    assert (plan.kind, plan.position, plan.matched) == ("miss", 0, 7)


def test_an_empty_store_and_a_prompt_of_one_token_are_misses() -> None:
    assert plan_of(new_store(), text(1, 31), CUTS).kind == "miss"
    assert plan_of(store_of(), text(1, 1), []).kind == "miss"


def test_of_prefix_and_divergence_the_longest_that_can_be_used_wins() -> None:
    store = store_of()
    keep(store, text(1, 20) + text(5, 30), [10, 20, 40, 49])
    plan = plan_of(store, text(1, 50), [*CUTS, 49])
    assert (plan.kind, plan.position) == ("prefix", 30)
    plan = plan_of(store, text(1, 20) + text(5, 25), [10, 20, 40, 44])
    assert (plan.kind, plan.position) == ("supersequence", 40)


def test_several_siblings_at_a_divergence_share_what_is_before_it() -> None:
    store = new_store()
    system = text(1, 20)
    for seed in (2, 3, 4):
        keep(store, system + text(seed, 20), [*CUTS, 39])
    plan = plan_of(store, system + text(5, 20), [*CUTS, 39])
    assert (plan.kind, plan.position, plan.matched) == ("lcp", 20, 20)
    assert len(plan.path) == 2


@pytest.mark.parametrize("is_exact", [False, True])
def test_the_last_forward_is_computed_even_if_all_of_the_prompt_is_kept(is_exact: bool) -> None:
    store = store_of(40, [*CUTS, 35])
    whole = slot(0, text(1, 36), [*CUTS, 35])
    plan = plan_of(store, text(1, 36), CUTS, [whole], is_exact)
    assert plan.position == 30


# ---------------------------------------------------------------- exactness


def test_an_exact_plan_goes_on_from_no_generated_run() -> None:
    store = store_of()
    end = list(store.extents)[-1].end
    keep(store, text(1, 45), [45], is_canonical=False, start=end)
    tokens, cuts = text(1, 60), [*CUTS, 45, 59]
    fast = plan_of(store, tokens, cuts)
    assert (fast.position, fast.is_canonical) == (45, False)
    exact = plan_of(store, tokens, cuts, is_exact=True)
    assert (exact.position, exact.is_canonical, exact.kind) == (30, True, "prefix")


def test_an_exact_plan_goes_on_from_no_slot_that_has_generated() -> None:
    generated = slot(3, text(1, 45), CUTS)
    tokens, cuts = text(1, 60), [*CUTS, 50, 59]
    assert plan_of(new_store(), tokens, cuts, [generated], is_exact=True).slot is None
    plan = plan_of(new_store(), tokens, cuts, [generated])
    assert (plan.slot, plan.position, plan.is_canonical) == (3, 45, False)
    canonical = slot(4, text(1, 30), CUTS)
    plan = plan_of(new_store(), tokens, cuts, [generated, canonical], is_exact=True)
    assert (plan.slot, plan.position, plan.is_canonical) == (4, 30, True)


def test_a_slot_that_was_cut_otherwise_is_not_exact() -> None:
    other = slot(0, text(1, 30), [15, 30])
    tokens, cuts = text(1, 40), [10, 20, 30, 39]
    assert plan_of(new_store(), tokens, cuts, [other], is_exact=True).position == 0
    plan = plan_of(new_store(), tokens, cuts, [other])
    assert (plan.position, plan.is_canonical) == (30, False)


def test_an_exact_plan_rewinds_a_slot_behind_what_it_generated() -> None:
    generated = slot(2, text(1, 45), CUTS)
    tokens, cuts = text(1, 35) + text(9, 10), [*CUTS, 44]
    plan = plan_of(store_of(), tokens, cuts, [generated], is_exact=True)
    assert (plan.slot, plan.position, plan.is_canonical) == (2, 30, True)


# ---------------------------------------------------------------- slots


def test_a_slot_that_the_prompt_extends_wins_over_stored_extents() -> None:
    idle = slot(1, text(1, 30), CUTS)
    plan = plan_of(store_of(), text(1, 50), [*CUTS, 49], [idle])
    assert (plan.slot, plan.position, plan.path, plan.source) == (1, 30, (), "slot")
    assert plan.is_canonical and plan.kind == "prefix"


def test_stored_extents_win_over_a_slot_that_holds_less() -> None:
    plan = plan_of(store_of(), text(1, 50), [*CUTS, 49], [slot(1, text(1, 20), [10, 20])])
    assert (plan.slot, plan.position) == (None, 30)


def test_of_several_slots_the_one_that_holds_most_is_continued() -> None:
    slots = [slot(n, text(1, 10 * n), CUTS[:n]) for n in (1, 3, 2)]
    for order in (slots, slots[::-1]):
        plan = plan_of(new_store(), text(1, 50), [*CUTS, 49], order)
        assert (plan.slot, plan.position, plan.matched) == (3, 30, 30)


def test_a_slot_that_went_on_otherwise_is_rewound_to_where_they_part() -> None:
    idle = slot(1, text(1, 30) + text(5, 8), [*CUTS, 35])
    plan = plan_of(store_of(), text(1, 30) + text(6, 20), [*CUTS, 49], [idle])
    assert (plan.slot, plan.position, plan.is_canonical) == (1, 30, True)
    assert plan.path[-1].end.position == 30, "what its windows and states need is on the path"


def test_a_slot_that_would_lose_more_than_a_copy_costs_is_left_to_its_session() -> None:
    for length, number in ((60, 1), (61, None)):
        idle = slot(1, text(1, 30) + text(5, length - 30), [*CUTS, 60])
        plan = plan_of(store_of(), text(1, 30) + text(6, 20), [*CUTS, 49], [idle])
        assert (plan.slot, plan.position) == (number, 30)


def test_a_slot_is_not_rewound_behind_its_floor() -> None:
    for floor, number in ((30, 1), (31, None)):
        idle = slot(1, text(1, 30) + text(5, 8), CUTS, floor)
        plan = plan_of(store_of(), text(1, 30) + text(6, 20), [*CUTS, 49], [idle])
        assert plan.slot == number


def test_a_slot_is_not_rewound_to_where_nothing_is_left_of_it() -> None:
    idle = slot(1, text(5, 30), CUTS)
    plan = plan_of(store_of(), text(6, 30), [10, 20, 29], [idle])
    assert (plan.slot, plan.position) == (None, 0)


def test_a_slot_whose_rows_are_generated_is_not_rewound_for_a_canonical_plan() -> None:
    idle = slot(1, text(1, 35), [10])
    plan = plan_of(store_of(), text(1, 30) + text(6, 20), [*CUTS, 49], [idle])
    assert (plan.slot, plan.position, plan.is_canonical) == (None, 30, True)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_slot_to_continue_is_taken_rather_than_one_to_rewind(is_reversed: bool) -> None:
    trunk, busy = slot(0, text(1, 30), CUTS), slot(1, text(1, 30) + text(5, 8), [*CUTS, 35])
    slots = [busy, trunk] if is_reversed else [trunk, busy]
    plan = plan_of(store_of(), text(1, 30) + text(6, 20), [*CUTS, 49], slots)
    assert (plan.slot, plan.path) == (0, ())


@pytest.mark.parametrize("is_reversed", [False, True])
def test_of_several_slots_the_one_that_loses_least_is_rewound(is_reversed: bool) -> None:
    slots = [slot(n, text(1, 30) + text(5, n), CUTS) for n in (20, 2)]
    plan = plan_of(
        store_of(),
        text(1, 30) + text(6, 20),
        [*CUTS, 49],
        slots[::-1] if is_reversed else slots,
    )
    assert plan.slot == 2


@pytest.mark.parametrize("is_reversed", [False, True])
def test_of_two_slots_that_hold_as_much_the_canonical_one_is_continued(is_reversed: bool) -> None:
    slots = [slot(0, text(1, 30), [10]), slot(1, text(1, 30), CUTS)]
    plan = plan_of(new_store(), text(1, 50), [*CUTS, 49], slots[::-1] if is_reversed else slots)
    assert (plan.slot, plan.is_canonical) == (1, True)


def test_a_retry_in_its_own_slot_is_rewound_behind_what_was_generated() -> None:
    idle = slot(1, text(1, 31) + text(5, 12), CUTS)
    plan = plan_of(store_of(), text(1, 31), CUTS, [idle])
    assert (plan.kind, plan.slot, plan.position) == ("exact", 1, 30)


# ---------------------------------------------------------------- states and windows


def test_a_prompt_that_a_lost_state_makes_resume_earlier_is_counted() -> None:
    store = new_store(HYBRID)
    kept = keep(store, text(1, 31), CUTS)
    tokens, cuts = text(1, 50), [*CUTS, 49]
    assert not plan_of(store, tokens, cuts).hybrid_trimmed
    store.set_snapshot(kept[2].end, None)
    plan = plan_of(store, tokens, cuts)
    assert (plan.position, plan.matched, plan.hybrid_trimmed) == (20, 30, True)
    assert plan.snapshot is kept[1].end.snapshot


def test_a_slot_makes_up_for_a_lost_state() -> None:
    store = new_store(HYBRID)
    kept = keep(store, text(1, 31), CUTS)
    store.set_snapshot(kept[2].end, None)
    plan = plan_of(store, text(1, 50), [*CUTS, 49], [slot(1, text(1, 30), CUTS)])
    assert (plan.slot, plan.position, plan.hybrid_trimmed) == (1, 30, False)
    assert plan.snapshot is None, "what it holds needs no state from elsewhere"


def test_a_slot_is_rewound_with_the_state_of_where_it_goes_back_to() -> None:
    store = new_store(HYBRID)
    kept = keep(store, text(1, 31), CUTS)
    idle = slot(1, text(1, 30) + text(5, 8), CUTS)
    plan = plan_of(store, text(1, 30) + text(6, 20), [*CUTS, 49], [idle])
    assert (plan.slot, plan.position) == (1, 30)
    assert plan.snapshot is kept[2].end.snapshot


def test_a_lost_window_makes_a_prompt_resume_earlier_too() -> None:
    store = new_store(WINDOWED)
    kept = keep(store, text(1, 31), CUTS)
    store.set_window(kept[2], Part(1), 29)
    plan = plan_of(store, text(1, 50), [*CUTS, 49])
    assert (plan.position, plan.hybrid_trimmed) == (20, True)


def test_rows_that_can_be_resumed_anywhere_are_never_called_trimmed() -> None:
    plan = plan_of(store_of(), text(1, 24) + text(9, 10), [10, 20, 22, 33])
    assert (plan.matched, plan.hybrid_trimmed) == (24, False)

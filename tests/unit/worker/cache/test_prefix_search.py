"""Checks the hashes of prefixes, and how far a prompt is found in the kept extents."""

import numpy as np
import pytest

from hearth.worker.cache.block_hash import (
    HASH_BYTES,
    common_length,
    pack,
    prefix_hashes,
    root_hash,
)
from hearth.worker.cache.extent_store import ExtentStore
from hearth.worker.cache.prefix_search import INSIDE_TOKENS_MIN, FoundPrefix, PrefixSearch
from scripts.harness.store_builders import (
    DENSE,
    HYBRID,
    MIXED,
    ROOT,
    WINDOWED,
    Part,
    ask,
    every,
    furnish,
    keep,
    name_of,
    new_line,
    new_store,
    spelled,
    text,
)


def search(
    store: ExtentStore, tokens: list[int], cuts: list[int], is_exact: bool = False
) -> FoundPrefix:
    return PrefixSearch(store, ask(tokens, cuts), is_exact).run()


# ---------------------------------------------------------------- names


def test_a_name_is_of_the_tokens_and_not_of_how_they_were_cut() -> None:
    tokens = pack(text(1, 40))
    names = [prefix_hashes(ROOT, tokens, ends)[-1] for ends in ([40], [7, 40], [1, 2, 3, 40])]
    assert len(set(names)) == 1 and len(names[0]) == HASH_BYTES


def test_names_of_a_prefix_are_those_of_what_extends_it() -> None:
    ends = [3, 9, 20]
    short, long = pack(text(1, 20)), pack(text(1, 90))
    assert prefix_hashes(ROOT, short, ends) == prefix_hashes(ROOT, long, [*ends, 90])[:3]


def test_a_name_differs_with_every_token_their_order_and_the_root() -> None:
    others = ([1, 2, 4], [2, 1, 3], [1, 2], [1, 2, 3, 0], [0, 1, 2, 3])
    names = {name_of([1, 2, 3]), *(name_of(tokens) for tokens in others)}
    roots = (["a", "b"], ["ab"], ["b", "a"], ["a", "b", ""], [])
    names |= {prefix_hashes(root_hash(parts), pack([1, 2, 3]), [3])[0] for parts in roots}
    assert len(names) == 1 + len(others) + len(roots)


def test_tokens_are_named_as_packed_integers_and_not_as_text() -> None:
    packed = pack([1, 23])
    assert packed.dtype == np.int32 and packed.tobytes() == b"\1\0\0\0\x17\0\0\0"
    assert name_of([1, 23]) != name_of([12, 3])


def test_an_id_that_does_not_fit_is_refused_rather_than_wrapped() -> None:
    with pytest.raises(OverflowError):
        pack([2**31])


def test_names_are_asked_for_in_order_and_within_the_tokens() -> None:
    for ends in ([3, 2], [4]):
        with pytest.raises(AssertionError):
            prefix_hashes(ROOT, pack([1, 2, 3]), ends)


def test_the_common_length_ends_at_the_first_difference_or_the_shorter_one() -> None:
    pairs = [([1, 2, 3], [1, 2, 4]), ([1, 2], [1, 2, 3]), ([], [1]), ([5], [6]), ([1], [1])]
    assert [common_length(pack(a), pack(b)) for a, b in pairs] == [2, 2, 0, 0, 1]


# ---------------------------------------------------------------- search


def test_nothing_is_found_where_nothing_is_kept() -> None:
    found = search(new_store(), [1, 2, 3], [2])
    assert (found.position, found.path, found.matched, found.is_canonical) == (0, (), 0, True)


def test_a_prompt_goes_on_from_the_last_of_its_cuts_that_is_kept() -> None:
    store = new_store()
    kept = keep(store, text(1, 30), [10, 20])
    found = search(store, text(1, 40), [10, 20, 30, 39])
    assert (found.position, found.path) == (20, tuple(kept))
    assert found.is_canonical and not found.is_diverging


def test_the_tokens_behind_the_last_cut_are_always_computed() -> None:
    store = new_store()
    keep(store, text(1, 30), [10, 20, 30])
    for is_exact in (False, True):
        assert search(store, text(1, 22), [10, 20], is_exact).position == 20


def test_a_generated_run_can_be_left_anywhere() -> None:
    store = new_store()
    (prompt,) = keep(store, text(1, 10), [10])
    keep(store, text(1, 30), [30], is_canonical=False, start=prompt.end)
    found = search(store, text(1, 25) + [7] * 10, [10, 34])
    assert (found.position, found.is_canonical, found.is_diverging) == (25, False, True)
    assert [extent.end.position for extent in found.path] == [10, 30]


def test_a_generated_run_is_used_up_to_the_last_cut_where_it_goes_on_behind_it() -> None:
    store = new_store()
    (prompt,) = keep(store, text(1, 10), [10])
    keep(store, text(1, 30), [30], is_canonical=False, start=prompt.end)
    assert search(store, text(1, 28), [10, 25]).position == 25, "it ends behind the prompt"
    assert search(store, text(1, 33), [10, 25]).position == 25, "it ends in the prompt's tail"


def test_a_prefilled_run_is_used_whole_or_not_at_all() -> None:
    store = new_store()
    keep(store, text(1, 30), [10, 30])
    found = search(store, text(1, 25) + [7] * 10, [10, 34])
    assert (found.position, found.matched, found.is_canonical) == (10, 25, True)


def test_behind_the_system_a_prefilled_run_is_left_where_the_prompt_leaves_it() -> None:
    """Exact search, a trunk and a layer with a state do not; what was kept stays as it is."""
    store = new_store()
    kept = keep(store, text(1, 90), [10, 90])
    tokens, cuts = text(1, 70) + [7] * 20, [10, 89]
    found = PrefixSearch(store, ask(tokens, cuts, system_end=10), is_exact=False).run()
    assert (found.position, found.is_canonical, found.path) == (70, False, tuple(kept))
    assert all(extent.is_canonical for extent in kept)
    for layout, system_end, is_exact in (
        *((DENSE, 10, True), (DENSE, 0, False), (DENSE, 70, False)),
        *((HYBRID, 10, False), (WINDOWED, 10, False)),
    ):
        store = new_store(layout)
        keep(store, text(1, 90), [10, 90])
        found = PrefixSearch(store, ask(tokens, cuts, system_end), is_exact).run()
        assert (found.position, found.is_canonical, found.matched) == (10, True, 70)


def test_a_prefilled_run_is_not_left_for_a_few_tokens() -> None:
    store = new_store()
    keep(store, text(1, 90), [10, 90])
    tokens = text(1, 10 + INSIDE_TOKENS_MIN - 1) + [7] * 60
    found = PrefixSearch(store, ask(tokens, [10, 100], system_end=10), is_exact=False).run()
    assert found.position == 10 and found.is_canonical


def test_exact_search_sees_no_generated_run_and_no_cut_but_the_prompts_own() -> None:
    store = new_store()
    prompt = keep(store, text(1, 20), [10, 20])
    keep(store, text(1, 40), [40], is_canonical=False, start=prompt[-1].end)
    tokens = text(1, 60)
    assert search(store, tokens, [10, 20, 40, 59], is_exact=True).position == 20
    assert search(store, tokens, [20, 40, 59], is_exact=True).position == 0
    found = search(store, tokens, [20, 40, 59])
    assert (found.position, found.is_canonical) == (40, False)


def test_exact_search_tells_how_far_the_prompt_is_like_what_is_kept() -> None:
    store = new_store()
    keep(store, text(1, 30), [10, 30])
    found = search(store, text(1, 17) + [7] * 10, [10, 26], is_exact=True)
    assert (found.position, found.matched, found.is_diverging) == (10, 17, True)


def test_of_several_branches_the_longest_is_followed() -> None:
    store = new_store()
    trunk = text(1, 10)
    for seed in (2, 3, 4):
        keep(store, trunk + text(seed, 20), [10, 20, 30])
    found = search(store, trunk + text(3, 15) + [7], [10, 20, 25])
    assert found.position == 20 and found.matched == 25
    assert spelled(found.path) == trunk + text(3, 10)


def test_a_state_is_resumed_only_where_a_snapshot_is() -> None:
    store = new_store(HYBRID)
    kept = keep(store, text(1, 30), [10, 20, 30])
    store.set_snapshot(kept[2].end, None)
    found = search(store, text(1, 31), [10, 20, 30])
    assert (found.position, found.snapshot) == (20, kept[1].end.snapshot)
    assert found.matched == 30


def test_a_window_is_resumed_only_where_its_rows_reach_back_far_enough() -> None:
    store = new_store(WINDOWED)
    kept = keep(store, text(1, 12), [6, 9, 11])
    tokens, cuts = text(1, 13), [6, 9, 11, 12]
    assert search(store, tokens, cuts).position == 11
    store.set_window(kept[1], None, 9)
    assert search(store, tokens, cuts).position == 6, "rows 7 and 8 are missing, then all of 6 to 8"


def test_a_window_far_behind_is_not_needed() -> None:
    store = new_store(WINDOWED)
    kept = keep(store, text(1, 12), [4, 8, 11])
    store.set_window(kept[0], None, 4)
    assert search(store, text(1, 13), [4, 8, 11]).position == 11
    store.set_window(kept[2], Part(1), 9)
    assert search(store, text(1, 13), [4, 8, 11]).position == 8, "row 8 is missing at 11"


def test_layers_of_all_kinds_are_resumed_where_all_can_be() -> None:
    store = new_store(MIXED)
    kept = keep(store, text(1, 30), [10, 20, 30])
    store.set_snapshot(kept[2].end, None)
    store.set_window(kept[1], None, 20)
    found = search(store, text(1, 31), [10, 20, 30])
    assert (found.position, found.matched) == (10, 30)


def test_a_prompt_that_was_prefilled_to_its_last_cut_is_known() -> None:
    store = new_store()
    kept = keep(store, text(1, 30), [10, 20])
    kept[1].end.is_prompt_end = True
    assert search(store, text(1, 30), [10, 20]).is_prompt
    assert not search(store, text(1, 30), [10]).is_prompt
    assert not search(store, text(1, 40), [10, 20, 39]).is_prompt


def test_a_prompt_of_one_token_asks_for_nothing() -> None:
    store = new_store()
    keep(store, [1, 2], [1, 2])
    found = search(store, [1], [])
    assert (found.position, found.matched, found.path) == (0, 1, ())


def test_a_long_prompt_looks_at_each_cut_once() -> None:
    store = new_store()
    length = 100_000
    line = new_line()
    tokens, cuts = text(1, length), every(256, length)
    keep(store, tokens, cuts, line)
    for extent in store.extents:
        furnish(store, extent)
    query = ask(tokens, cuts)
    looked = 0
    joint = store.joint

    def count(name: bytes) -> object:
        nonlocal looked
        looked += 1
        return joint(name)

    store.joint = count  # type: ignore[method-assign, assignment]
    for is_exact in (False, True):
        looked = 0
        assert PrefixSearch(store, query, is_exact).run().position == cuts[-1]
        assert looked <= len(cuts) + 1

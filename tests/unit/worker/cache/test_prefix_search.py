"""Checks the hashes of prefixes, and how far a prompt is found in the kept extents."""

import pytest

from hearth.worker.cache.block_hash import HASH_BYTES, common_length, pack, prefix_hashes
from hearth.worker.cache.extent_store import ExtentStore
from hearth.worker.cache.prefix_search import INSIDE_TOKENS_MIN, FoundPrefix, PrefixSearch
from scripts.harness.store_builders import (
    DENSE,
    HYBRID,
    ROOT,
    WINDOWED,
    ask,
    every,
    furnish,
    keep,
    new_line,
    new_store,
    text,
)

# ---------------------------------------------------------------- names


def test_a_name_is_of_the_tokens_and_not_of_how_they_were_cut() -> None:
    tokens = pack(text(1, 40))
    names = [prefix_hashes(ROOT, tokens, ends)[-1] for ends in ([40], [7, 40], [1, 2, 3, 40])]
    assert len(set(names)) == 1 and len(names[0]) == HASH_BYTES


def test_an_id_that_does_not_fit_is_refused_rather_than_wrapped() -> None:
    with pytest.raises(OverflowError):
        pack([2**31])


def test_the_common_length_ends_at_the_first_difference_or_the_shorter_one() -> None:
    pairs = [([1, 2, 3], [1, 2, 4]), ([1, 2], [1, 2, 3]), ([], [1]), ([5], [6]), ([1], [1])]
    assert [common_length(pack(a), pack(b)) for a, b in pairs] == [2, 2, 0, 0, 1]


# ---------------------------------------------------------------- search


@pytest.mark.parametrize(
    ("saved", "position"),
    [(INSIDE_TOKENS_MIN - 1, 10), (INSIDE_TOKENS_MIN, 10 + INSIDE_TOKENS_MIN)],
)
def test_a_prefilled_run_is_not_left_for_a_few_tokens(saved: int, position: int) -> None:
    store = new_store()
    keep(store, text(1, 90), [10, 90])
    tokens = text(1, 10 + saved) + [7] * 60
    found = PrefixSearch(store, ask(tokens, [10, 100], system_end=10), is_exact=False).run()
    assert (found.position, found.is_canonical) == (position, position == 10)


def search(
    store: ExtentStore, tokens: list[int], cuts: list[int], is_exact: bool = False
) -> FoundPrefix:
    return PrefixSearch(store, ask(tokens, cuts), is_exact).run()


def test_a_window_is_resumed_only_where_its_rows_reach_back_far_enough() -> None:
    store = new_store(WINDOWED)
    kept = keep(store, text(1, 12), [4, 8, 11])
    tokens, cuts = text(1, 13), [4, 8, 11, 12]
    assert search(store, tokens, cuts).position == 11
    store.set_window(kept[1], None, 8)
    assert search(store, tokens, cuts).position == 4, "row 7 is missing, then all of 4 to 7"


def test_exact_search_sees_no_generated_run_and_no_cut_but_the_prompts_own() -> None:
    store = new_store()
    prompt = keep(store, text(1, 20), [10, 20])
    keep(store, text(1, 40), [40], is_canonical=False, start=prompt[-1].end)
    tokens = text(1, 60)
    assert search(store, tokens, [10, 20, 40, 59], is_exact=True).position == 20
    assert search(store, tokens, [20, 40, 59], is_exact=True).position == 0
    found = search(store, tokens, [20, 40, 59])
    assert (found.position, found.is_canonical) == (40, False)


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
    node = store.node

    def count(name: bytes) -> object:
        nonlocal looked
        looked += 1
        return node(name)

    store.node = count  # type: ignore[method-assign, assignment]
    for is_exact in (False, True):
        looked = 0
        assert PrefixSearch(store, query, is_exact).run().position == cuts[-1]
        assert looked <= len(cuts) + 1

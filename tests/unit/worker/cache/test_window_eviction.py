"""Checks which window rows make way where a place to resume at takes those of several runs."""

import math
from collections.abc import Sequence

from hearth.worker.cache.eviction import Evictor
from hearth.worker.cache.extent_store import ExtentStore
from hearth.worker.cache.prefix_search import PrefixSearch
from scripts.harness.store_builders import WINDOWED, ask, keep, new_store, text

RUN = 2  # tokens of each run: half of a window


def resumed(store: ExtentStore, tokens: Sequence[int], cuts: Sequence[int]) -> int:
    return PrefixSearch(store, ask(tokens, cuts), False).run().position


def windows(store: ExtentStore) -> int:
    return sum(extent.window is not None for extent in store.extents)


def thin_out(store: ExtentStore, left: int) -> None:
    """Have the evictor make room until so many windows are left."""
    evictor = Evictor(store, RUN, 0.0)
    while windows(store) > left:
        store.budget.bytes_max = store.budget.bytes_used
        assert evictor.make_room(1, 0, math.inf, 0.0)
        store.check()


def test_places_to_resume_at_thin_out_evenly() -> None:
    store = new_store(WINDOWED)
    tokens, cuts = text(1, 129), list(range(RUN, 129, RUN))
    keep(store, tokens, cuts)
    for left, most in ((48, 8), (32, 12), (16, 32)):  # two windows make a place
        thin_out(store, left)
        again = [
            end - resumed(store, [*tokens[:end], *text(2, 2)], cuts[: number + 1])
            for number, end in enumerate(cuts)
        ]
        assert max(again) <= most and again[-1] == 0, (left, again)


def test_a_window_that_lacks_another_is_worth_nothing_but_where_a_line_goes_on() -> None:
    store = new_store(WINDOWED)
    first, second, third, last = keep(store, text(1, 8), [2, 4, 6, 8])
    evictor = Evictor(store, RUN, 0.0)
    whole = evictor.window_worth(third, 20, 0.0)
    store.set_window(second, None, second.end.position)
    assert evictor.window_worth(third, 20, 0.0) >= whole, "the tip looks back to it"
    store.set_window(last, None, last.end.position)
    keep(store, text(1, 10), [10], start=last.end)
    assert evictor.window_worth(third, 20, 0.0) == 0.0
    assert evictor.window_worth(first, 20, 0.0) > 0.0, "it is the whole window at its end"

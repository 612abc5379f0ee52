"""Of any store of prompts exactly what nothing has used for the TTL expires."""

import math

from hypothesis import given, settings, strategies as st

from hearth.worker.cache.eviction import find_expired
from hearth.worker.cache.extent_store import Extent, path_to
from scripts.harness.store_builders import check_store, every, keep, new_line, new_store

TTL_S = 10.0
TIMES = st.integers(0, 30).map(float)
PROMPTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0, 1]), min_size=1, max_size=6),  # blocks: few, so many branch
        TIMES,
        st.sampled_from(["", "", "running", "standing", "pinned"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150)
@given(PROMPTS, TIMES, st.lists(st.tuples(st.integers(0, 7), TIMES), max_size=3))
def test_what_expires_is_what_nothing_has_used(
    prompts: list[tuple[list[int], float, str]], now: float, slots: list[tuple[int, float]]
) -> None:
    store = new_store()
    ends = []
    for number, (blocks, used_at, state) in enumerate(prompts):
        line = new_line(number, used_at)
        tokens = [block * 10 + n for block in blocks for n in range(4)]
        rows = keep(store, tokens, every(4, len(tokens) + 1), line)
        line.is_running = state == "running"
        rows[-1].end.pins += state == "standing"
        for extent in path_to(rows[-1].end) if state == "pinned" else ():
            extent.pinned += 1
        ends.append(rows[-1].end)
    standing = [(ends[at], used_at) for at, used_at in slots if at < len(ends)]

    def uses(extent: Extent) -> float:
        """Return when the extent was used last, by its definition: from all that is behind it."""
        own = [extent.line.used_at, *(at for node, at in standing if node is extent.end)]
        held = extent.line.is_running or extent.end.pins or extent.pinned
        return max([math.inf if held else max(own), *map(uses, extent.end.leaving)])

    found, next_at = find_expired(store, standing, now, TTL_S)
    assert set(found) == {e for e in store.extents if uses(e) + TTL_S <= now}
    rest = [uses(e) + TTL_S for e in store.extents if e not in found]
    assert next_at == min(rest, default=math.inf)
    for extent in found:
        assert not extent.end.leaving, "a child would have gone unseen"
        store.remove(extent)
    check_store(store)
    assert not find_expired(store, standing, now, TTL_S)[0]

"""Search, held to what can be resumed by definition: every kept run is looked at, one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from hearth.worker.cache import prefix_search
from hearth.worker.cache.extent_store import Extent, ExtentStore, Layout, PrefixNode
from hearth.worker.cache.prefix_search import FoundPrefix, PrefixQuery, PrefixSearch
from scripts.harness.store_builders import (
    DENSE,
    HYBRID,
    MIXED,
    STATES_ONLY,
    WINDOWED,
    Part,
    ask,
    check_store,
    keep,
    new_store,
    path_to,
    prefix_of,
    spelled,
)

LAYERED = [HYBRID, WINDOWED, MIXED, STATES_ONLY]
INSIDE_MIN = 2
TOKENS = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=10)


@pytest.fixture(autouse=True, scope="module")
def short_forwards() -> Iterator[None]:
    """Prompts are a few tokens long here: a run may be left after as few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_search, "INSIDE_TOKENS_MIN", INSIDE_MIN)
        yield


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    cuts: list[int]
    fast_from: int  # runs that end behind it are committed as fast


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    tokens = draw(TOKENS)
    cuts = sorted(draw(st.sets(st.integers(1, len(tokens)), min_size=1, max_size=4)))
    return Prompt(tokens, cuts, draw(st.sampled_from([0, 99, *cuts])))


@st.composite
def scenes(draw: st.DrawFn, layouts: Sequence[Layout]) -> tuple[ExtentStore, PrefixQuery]:
    """Draw a prompt, and a store after others, some of their windows and snapshots lost since."""
    store = new_store(draw(st.sampled_from(layouts)))
    some = draw(st.lists(prompts(), min_size=1, max_size=5))
    for prompt in some:
        good = [cut for cut in prompt.cuts if cut <= prompt.fast_from]
        rest = prompt.cuts[len(good) :]
        kept = keep(store, prompt.tokens, good)
        end = kept[-1].end if kept else store.root
        keep(store, prompt.tokens, rest, is_canonical=False, start=end)
        if kept and not rest:
            end.is_prompt_end = True
    rob(draw, store)
    check_store(store)
    return store, draw(queries([prompt.tokens for prompt in some]))


def rob(draw: st.DrawFn, store: ExtentStore) -> None:
    for extent in store.extents:
        loss = draw(st.sampled_from(["none", "none", "window", "part", "snapshot"]))
        if loss == "window":
            store.set_window(extent, None, extent.end.position)
        elif loss == "part" and extent.window is not None:
            start = max(extent.window_from, extent.end.position - 2)
            store.set_window(extent, Part(1), start)
        elif loss == "snapshot":
            store.set_snapshot(extent.end, None)


@st.composite
def queries(draw: st.DrawFn, kept: list[list[int]]) -> PrefixQuery:
    """Draw a prompt that may begin as something kept does."""
    tokens = draw(st.sampled_from([[], *kept])) + draw(TOKENS)
    cuts = sorted(draw(st.sets(st.integers(1, len(tokens)), min_size=1, max_size=5)))
    cuts = [cut for cut in cuts if cut < len(tokens)]
    return ask(tokens, cuts, draw(st.sampled_from([0, *cuts])))


def shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    differ = [place for place, (a, b) in enumerate(pairs) if a != b]
    return differ[0] if differ else min(len(one), len(other))


def own_run(store: ExtentStore, query: PrefixQuery) -> list[Extent]:
    """Return the canonical extents at the query's own cuts, from the first on, without a gap."""
    tokens, run, start = query.tokens.tolist(), [], 0
    for cut in query.cuts:
        fitting = [
            extent
            for extent in store.extents
            if extent.is_canonical
            and (extent.start.position, extent.end.position) == (start, cut)
            and prefix_of(extent.end) == tokens[:cut]
        ]
        if not fitting:
            break
        run += fitting
        start = cut
    return run


def has_rows_before(store: ExtentStore, node: PrefixNode) -> bool:
    """Whether every row that the window needs at `node` is kept."""
    held: set[int] = set()
    for extent in path_to(node):
        if extent.window is not None:
            held |= set(range(extent.window_from, extent.end.position))
    needed = range(max(0, node.position - store.layout.window), node.position)
    return not store.layout.window or held.issuperset(needed)


def can_resume(store: ExtentStore, node: PrefixNode) -> bool:
    has_state = not store.layout.has_state or node.snapshot is not None
    return has_state and has_rows_before(store, node)


def best_by_definition(store: ExtentStore, query: PrefixQuery, is_exact: bool) -> int:
    run = own_run(store, query)
    if is_exact:
        return max((e.end.position for e in run if can_resume(store, e.end)), default=0)
    tokens, places = query.tokens.tolist(), [0]
    for extent in store.extents:
        common = shared(prefix_of(extent.end), tokens)
        end = extent.end.position
        if common == end <= query.limit and can_resume(store, extent.end):
            places.append(end)
        if store.layout.resumes_anywhere:
            reach = min(common, query.limit)
            saved = reach - extent.start.position
            is_own = reach > query.system_end > 0 and saved >= INSIDE_MIN
            places.append(reach if saved > 0 and (is_own or not extent.is_canonical) else 0)
    return max(places)


def check_path(found: FoundPrefix, store: ExtentStore, query: PrefixQuery, is_exact: bool) -> None:
    """The path begins at the root, has no gap, and spells the prompt to where it resumes."""
    node = store.root
    for extent in found.path:
        assert extent in store and extent.start is node
        node = extent.end
    spells = spelled(found.path)[: found.position]
    assert spells == query.tokens.tolist()[: found.position]
    if found.path:
        last = found.path[-1]
        assert last.start.position < found.position <= last.end.position
        assert found.position <= query.limit
    else:
        assert found.position == 0
    assert not is_exact or all(extent.is_canonical for extent in found.path)


def check_search(store: ExtentStore, query: PrefixQuery) -> None:
    for is_exact in (False, True):
        found = PrefixSearch(store, query, is_exact).run()
        check_path(found, store, query, is_exact)
        assert found.position == best_by_definition(store, query, is_exact)


@given(scenes([DENSE]))
def test_a_prompt_is_resumed_as_far_as_is_possible_at_all(
    scene: tuple[ExtentStore, PrefixQuery],
) -> None:
    check_search(*scene)


@given(scenes(LAYERED))
def test_states_and_windows_are_resumed_as_far_as_they_can_be(
    scene: tuple[ExtentStore, PrefixQuery],
) -> None:
    check_search(*scene)


@given(scenes([DENSE, *LAYERED]), st.booleans())
def test_what_is_called_canonical_is_what_a_prefill_of_this_prompt_would_write(
    scene: tuple[ExtentStore, PrefixQuery], is_exact: bool
) -> None:
    store, query = scene
    found = PrefixSearch(store, query, is_exact).run()
    run = own_run(store, query)
    is_own = found.path == tuple(run[: len(found.path)])
    if store.layout.has_state and found.path:
        assert found.path[-1].end.snapshot is not None
    assert found.is_canonical == is_own
    assert found.is_canonical or not is_exact


@given(scenes([DENSE, *LAYERED]))
def test_the_match_is_the_longest_prefix_shared_with_anything_kept(
    scene: tuple[ExtentStore, PrefixQuery],
) -> None:
    store, query = scene
    found = PrefixSearch(store, query, is_exact=False).run()
    tokens = query.tokens.tolist()
    kept = [prefix_of(extent.end) for extent in store.extents]
    assert found.matched == max((shared(prefix, tokens) for prefix in kept), default=0)
    others = [p for p in kept if shared(p, tokens) == found.matched < min(len(p), len(tokens))]
    assert found.is_diverging == bool(others)


@given(scenes([DENSE, *LAYERED]))
def test_a_prompt_is_known_only_where_one_ended_at_its_last_cut(
    scene: tuple[ExtentStore, PrefixQuery],
) -> None:
    store, query = scene
    found = PrefixSearch(store, query, is_exact=False).run()
    last = query.tokens.tolist()[: query.limit]
    ended = [j for j in store.nodes if j.is_prompt_end and prefix_of(j) == last]
    assert found.is_prompt == bool(ended)


def by_rule(tokens: list[int]) -> list[int]:
    """Return cuts that depend on what is before them only, and the last token left alone."""
    natural = {end for end in range(1, len(tokens)) if tokens[end - 1] == 2}
    return sorted(natural | ({len(tokens) - 1} - {0}))


@given(st.lists(TOKENS, min_size=1, max_size=8), st.booleans())
def test_a_prompt_that_was_prefilled_is_found_again_to_its_last_cut(
    prompts: list[list[int]], is_exact: bool
) -> None:
    store = new_store()
    for tokens in prompts:
        keep(store, tokens, by_rule(tokens))
    for tokens in prompts:
        found = PrefixSearch(store, ask(tokens, by_rule(tokens)), is_exact).run()
        assert found.position == len(tokens) - 1 and found.is_canonical

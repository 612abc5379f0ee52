"""Whatever happens while a prompt waits, the plan that lies on it is what a search would find."""

from hypothesis import given, strategies as st

from scripts.harness.slow_properties import slow
from tests.helpers.worker.zero_kv_manager import AMPLE, EVENTS, LAYERS, Managing


@slow(200)
@given(
    kind=st.sampled_from(LAYERS),
    is_exact=st.booleans(),
    slots_max=st.integers(1, 3),
    tokens_max=st.sampled_from([0, 60, AMPLE]),
    events=st.lists(
        st.tuples(st.sampled_from(EVENTS), st.integers(0, 10**6)), min_size=20, max_size=60
    ),
)
def test_a_kept_plan_is_what_a_search_would_find(
    kind: str, is_exact: bool, slots_max: int, tokens_max: int, events: list[tuple[str, int]]
) -> None:
    Managing(kind, slots_max, tokens_max, is_exact=is_exact).play(events)

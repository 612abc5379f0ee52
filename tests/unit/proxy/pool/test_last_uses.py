"""A model that others use is not theirs to unload who have another key."""

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.pool import worker_link
from hearth.proxy.pool.worker_link import OTHERS_KEEP_S, LastUses

KEYS = ("", "a", "b")


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.floats(0.1, OTHERS_KEEP_S)), max_size=8))
def test_a_model_is_kept_for_whoever_else_used_it_a_short_while_ago(
    uses: list[tuple[str, float]],
) -> None:
    now, rows, by_key = 1_000.0, LastUses(), dict[str, float]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_link, "awake_s", lambda: now)
        for key, rest_s in uses:
            rows.record(key)
            by_key[key] = now
            now += rest_s
        for key in KEYS:
            others = [at for other, at in by_key.items() if other != key]
            expected = any(now - at < OTHERS_KEEP_S for at in others)
            assert rows.is_kept_for_others(key) == expected, (key, uses)

"""Checks that what is read again is found token by token, and that a loss is no more than it."""

from hypothesis import given, strategies as st

from hearth.worker.cache.block_hash import pack
from hearth.worker.sessions.find_divergence import RUN, tokens_read_again
from hearth.worker.sessions.session_context import SLACK, Cause, Divergence

# Few tokens, so that runs repeat; images are negative.
TEXTS = st.lists(st.integers(-2, 3), min_size=RUN - 2, max_size=3 * RUN)
POSITIONS = st.integers(0, 400)


def by_hand(was: list[int], now: list[int]) -> list[int]:
    """Return the positions of `now` that lie in a run that `was` has, looked for one by one."""
    runs = {tuple(was[at : at + RUN]) for at in range(len(was) - RUN + 1)}
    starts = [at for at in range(len(now) - RUN + 1) if tuple(now[at : at + RUN]) in runs]
    return sorted({at + more for at in starts for more in range(RUN)})


@given(TEXTS, TEXTS, TEXTS)
def test_runs_that_both_have_are_found_wherever_they_stand(
    one: list[int], shared: list[int], other: list[int]
) -> None:
    was, now = one + shared, other + shared + one
    assert tokens_read_again(pack(was), pack(now)).tolist() == by_hand(was, now)


@given(st.sets(POSITIONS, max_size=200), POSITIONS, POSITIONS)
def test_a_loss_is_counted_among_the_prefilled_tokens_alone(
    again: set[int], one: int, other: int
) -> None:
    cached, fed = sorted((one, other))
    loss = Divergence(Cause("system prompt", 0), 0, 400, "system", reread=pack(sorted(again)))
    found = loss.within(cached, fed)
    lost = sum(cached <= at < fed for at in again)
    assert (found.lost if found is not None else 0) == (lost if lost > SLACK else 0)

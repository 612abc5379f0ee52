"""A run's drafts are summed from readings, over workers that end and begin anew."""

from typing import Any

from hypothesis import given, strategies as st

from scripts.chaos.draft_tally import DraftTally, drafts_line


def row(worker: int, drafted: int, accepted: int) -> dict[str, Any]:
    halves = [
        {"drafted": drafted // 2, "accepted": accepted},
        {"drafted": drafted - drafted // 2, "accepted": 0},
    ]
    sources = dict(zip(("forced", "history"), halves, strict=True))
    return {"worker": worker, "speculation": {"by_source": sources}}


@given(st.lists(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=5)))
def test_what_each_life_of_a_worker_counted_last_is_in_the_sum(
    lives: list[list[tuple[int, int]]],
) -> None:
    tally, wanted = DraftTally(), [0, 0]
    for life in lives:
        counts = [0, 0]
        for more in [(0, 0), *life]:  # a worker that was started anew is first seen at 0
            counts = [count + added for count, added in zip(counts, more, strict=True)]
            tally.take([row(0, *counts)])
        wanted = [whole + count for whole, count in zip(wanted, counts, strict=True)]
    assert [tally.total["drafted"], tally.total["accepted"]] == wanted


def test_workers_are_told_apart_and_those_that_tell_nothing_are_passed_over() -> None:
    tally = DraftTally()
    tally.take([row(0, 5, 2), row(1, 7, 3), {"worker": 2, "error": "gone"}])
    tally.take([])
    tally.take([row(0, 6, 2), row(1, 7, 4)])
    assert tally.total == {"drafted": 13, "accepted": 6}
    assert "13 tokens" in drafts_line(tally.total) and "6 of them" in drafts_line(tally.total)

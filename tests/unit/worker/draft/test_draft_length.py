"""The length of a draft follows from what rows cost and from what was right before."""

import pytest

from hearth.worker.draft.draft_length import CPU_CURVE, ROWS_MAX, DraftLength, costs_of

STEEP = {1: 1.0, 2: 1.7, 4: 3.3, 8: 6.1}  # an M3 Ultra with 4-bit weights (mlx issue 4265)
FLAT = {1: 1.0, 8: 1.05}


def sure(count: int, rate: float) -> list[float]:
    """Return the chances of a chain whose tokens are each right at `rate`."""
    return [rate ** (at + 1) for at in range(count)]


def test_costs_lie_on_lines_between_the_points_and_go_on_behind_the_last() -> None:
    costs = costs_of({1: 2.0, 2: 2.2, 4: 3.0, 8: 5.0}, rows_max=10)
    assert costs == pytest.approx((0, 1.0, 1.1, 1.3, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0))


@pytest.mark.parametrize(
    ("curve", "rate", "waiting", "drafted"),
    [
        (FLAT, 0.99, 1, ROWS_MAX - 1),  # sure tokens, up to eight rows with those that wait
        (FLAT, 0.99, 3, ROWS_MAX - 3),
        (FLAT, 0.99, ROWS_MAX, 0),
        (FLAT, 0.99, 12, 0),
        (FLAT, 0.3, 1, 3),  # unlikely ones where rows are cheap only
        (CPU_CURVE, 0.3, 1, 1),
        (STEEP, 0.3, 1, 0),
        (STEEP, 0.9, 1, 0),  # where rows cost nearly a forward, only what is certain
        (STEEP, 0.99, 1, ROWS_MAX - 1),
        (CPU_CURVE, 0.8, 1, 4),  # rows that wait make a draft shorter
        (CPU_CURVE, 0.8, 4, 3),
    ],
)
def test_tokens_are_drafted_as_far_as_they_are_likely_to_save_more_than_their_rows_cost(
    curve: dict[int, float], rate: float, waiting: int, drafted: int
) -> None:
    length = DraftLength(curve)
    length.record(20, 21)  # a draft was right: it may be long
    assert length.count(sure(16, rate), waiting) == drafted


def test_a_model_that_feeds_accepted_tokens_again_is_drafted_less() -> None:
    cheap, dear = DraftLength(), DraftLength()
    dear.count(sure(1, 0.5), 2)  # it is known by the rows that wait
    counts = [(dear.count(sure(7, p), 1), cheap.count(sure(7, p), 1)) for p in (0.6, 0.7, 0.8, 0.9)]
    assert all(again <= once for again, once in counts), counts
    assert any(again < once for again, once in counts), counts


def test_what_was_wrong_is_held_for_less_likely_and_what_was_right_for_more() -> None:
    rates = DraftLength().rates
    before = rates.rate("history", "text", 5)
    for _ in range(6):
        rates.record("history", "text", 5, right=False)
    assert rates.rate("history", "text", 5) < before / 2
    for _ in range(20):
        rates.record("history", "text", 5, right=True)
    assert rates.rate("history", "text", 5) > before


def test_a_length_never_tried_is_as_good_as_its_source_has_been() -> None:
    rates = DraftLength().rates
    before = {kind: rates.rate("history", kind, 20) for kind in ("text", "thinking")}
    other = rates.rate("answers", "text", 20)
    for _ in range(12):
        rates.record("history", "text", 3, right=False)
    assert rates.rate("history", "text", 20) < before["text"] / 2
    assert rates.rate("history", "text", 20) < rates.rate("history", "thinking", 20)
    assert rates.rate("answers", "text", 20) == other


def test_forced_tokens_are_trusted_from_the_start_and_not_for_ever() -> None:
    rates = DraftLength().rates
    assert rates.rate("forced", "call", 0) > 0.95 > rates.rate("history", "call", 64)
    for _ in range(30):
        rates.record("forced", "call", 0, right=False)
    assert rates.rate("forced", "call", 0) < 0.15


def test_behind_a_right_probe_the_next_one_is_not_far() -> None:
    length = DraftLength()

    def tokens_to_probe() -> int:
        for tokens in range(1, 200):
            length.count_tokens(1)
            if length.count((0.01,), 1):
                return tokens
        return 0

    waits = []
    for _ in range(4):
        waits.append(tokens_to_probe())
        length.record(0, 2)
    tokens_to_probe()
    length.record(1, 2)
    assert waits == [24, 48, 96, 96] and tokens_to_probe() == 24

"""Any history finds only what is there, and the longest of what it looks at."""

import numpy as np
from hypothesis import given, settings, strategies as st

from hearth.worker.draft.token_history import (
    FITTING_MAX,
    MATCH_MAX,
    NEAR_BEFORE,
    NEAR_BEHIND,
    ORDERS,
    POSITIONS_MAX,
    SEPARATOR,
    Match,
    TokenHistory,
)

TOKENS = st.integers(0, 4) | st.integers(0, 2**31 - 1)
TEXTS = st.lists(TOKENS | st.just(SEPARATOR), max_size=60)


def matches(text: list[int], tail: list[int]) -> list[Match]:
    """Return each place of a text that `tail` ends like and that a token follows."""
    found = []
    for end in range(1, len(text)):
        length = 0
        while length < min(end, len(tail), MATCH_MAX):
            if text[end - 1 - length] != tail[-1 - length]:
                break
            length += 1
        if length >= min(ORDERS) and text[end] != SEPARATOR:
            found.append(Match(length, end))
    return found


@settings(max_examples=300, deadline=None)
@given(TEXTS, TEXTS, st.lists(TOKENS, max_size=80), st.integers(0, 3))
def test_what_is_found_is_there_and_nothing_is_overlooked(
    at_once: list[int], one_by_one: list[int], tail: list[int], other: int
) -> None:
    history = TokenHistory(at_once)
    for token in one_by_one:
        history.extend((token,))
    text = at_once + one_by_one
    known = matches(text, tail)
    match = history.find(tail)
    assert match in known if match is not None else not known
    if 0 < len(known) <= POSITIONS_MAX // 2:
        assert match == max(known), "the longest, and of those the newest"
    if match is not None:
        assert history.token_at(match.end) == text[match.end]
        assert SEPARATOR not in history.followed(match.end, 70)
        assert history.followed(match.end, 1) == [text[match.end]]
    beside = history.find(tail, unlike=other)
    assert beside is None or (beside in known and text[beside.end] != other)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=150), st.data())
def test_it_makes_no_difference_how_the_tokens_came(tokens: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), min_size=1, max_size=6)))
    in_pieces = TokenHistory(tokens[: cuts[0]], room=1)
    for begin, end in zip(cuts, [*cuts[1:], len(tokens)], strict=True):
        in_pieces.extend(tokens[begin:end])
    at_once = TokenHistory(tokens)
    assert len(in_pieces) == len(at_once) == len(tokens)
    for end in range(len(tokens) + 1):
        assert in_pieces.find(tokens[:end]) == at_once.find(tokens[:end])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(600, 2_000))
def test_it_grows_and_forgets_nothing(head: list[int], count: int) -> None:
    history = TokenHistory(head)
    history.extend([100 + at for at in range(count)])
    history.extend([5_000, 5_001, 7])
    assert history.newest(3).tolist() == [5_000, 5_001, 7]
    for at in (100, 100 + count // 2, 100 + count - 3):
        match = history.find([at, at + 1])
        assert match is not None and history.token_at(match.end) == at + 2


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(0, 200), TOKENS)
def test_the_nearest_place_behind_a_token_is_found_and_none_far_away(
    text: list[int], end: int, token: int
) -> None:
    around = range(max(1, end - NEAR_BEFORE + 1), min(end + NEAR_BEHIND, len(text) - 1) + 1)
    known = [at for at in around if text[at - 1] == token and text[at] != SEPARATOR]
    near = TokenHistory(text).find_near(end, token)
    if known:
        assert near in known and abs(near - end) == min(abs(at - end) for at in known)
    else:
        assert near == 0


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(TOKENS, min_size=1, max_size=3), st.sets(TOKENS, max_size=2))
def test_of_the_few_tokens_that_may_come_the_one_is_found_that_came_last_behind_the_same(
    text: list[int], tail: list[int], few: set[int]
) -> None:
    match = TokenHistory(text).find_fitting(tail, few.__contains__)
    for length in range(min(2, len(tail)), 0, -1):
        ends = range(length, len(text))
        same = [end for end in ends if text[end - length : end] == tail[-length:]]
        known = [end for end in same[-FITTING_MAX:] if text[end] in few]
        if known:
            assert match == Match(length, known[-1])
            return
    assert match is None


# ---------------------------------------------------------------- what draws rarely reach


def test_nothing_is_known_behind_a_texts_end() -> None:
    history = TokenHistory([1, 2, SEPARATOR, 3])
    assert (history.followed(4, 5), history.token_at(4), history.token_at(2)) == ([], None, None)
    assert history.token_at(3) == 3


def test_a_match_is_counted_up_to_64_tokens() -> None:
    tokens = list(range(100))
    history = TokenHistory([*tokens, 200, *tokens])
    assert history.find(tokens) == Match(64, 100)


def test_a_token_costs_24_bytes_at_most() -> None:
    history = TokenHistory(np.arange(100_000, dtype=np.int32))
    assert history.nbytes <= 24 * 100_000

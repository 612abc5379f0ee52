"""A history finds where the last tokens stood before, and what followed there."""

import random

import numpy as np

from hearth.worker.draft.token_history import SEPARATOR, Match, TokenHistory


def test_the_longest_match_wins_over_a_newer_one() -> None:
    history = TokenHistory([1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 1, 2, 3, 4])
    match = history.find([1, 2, 3, 4])
    assert match == Match(4, 4)
    assert history.followed(4, 2) == [50, 9]


def test_of_matches_as_long_the_newest_wins() -> None:
    history = TokenHistory([2, 3, 4, 50, 2, 3, 4, 60, 2, 3, 4])
    match = history.find([2, 3, 4])
    assert match == Match(3, 7)
    assert history.followed(7, 1) == [60]


def test_a_match_ends_at_the_first_token_that_differs() -> None:
    # The newer place first: the older one has the token in front of its match, and not the match.
    history = TokenHistory([1, 9, 3, 4, 60, 2, 3, 4, 50])
    assert history.find([1, 2, 3, 4]) == Match(3, 8)


def test_an_end_that_nothing_follows_is_no_match() -> None:
    assert TokenHistory(range(20)).find([17, 18, 19]) is None
    assert TokenHistory([1, 2, SEPARATOR, 1, 2]).find([1, 2]) is None
    assert TokenHistory([1, 2, 3, SEPARATOR, 1, 2]).find([1, 2]) == Match(2, 2)


def test_nothing_is_known_behind_a_texts_end() -> None:
    history = TokenHistory([1, 2, SEPARATOR, 3])
    assert (history.followed(4, 5), history.token_at(4), history.token_at(2)) == ([], None, None)
    assert history.token_at(3) == 3


def test_a_place_that_is_followed_by_another_token_is_found_beside_the_best() -> None:
    history = TokenHistory([7, 2, 3, 4, 50, 8, 2, 3, 4, 60, 7, 2, 3, 4])
    tail = [7, 2, 3, 4]
    assert history.find(tail) == Match(4, 4)
    assert history.find(tail, unlike=50) == Match(3, 9)
    assert history.find([9, 9, 9], unlike=50) is None


def test_no_draft_and_no_match_reaches_across_a_separator() -> None:
    history = TokenHistory([1, 2, 3, SEPARATOR, 4, 5, 6])
    assert history.followed(2, 9) == [3]
    assert history.find([3, 4, 5]) == Match(2, 6)


def test_a_match_is_counted_up_to_64_tokens() -> None:
    tokens = list(range(100))
    history = TokenHistory([*tokens, 200, *tokens])
    assert history.find(tokens) == Match(64, 100)


def test_tokens_taken_one_by_one_are_found_like_those_taken_at_once() -> None:
    chance = random.Random(3)
    tokens = [chance.randrange(6) for _ in range(3_000)]
    at_once, one_by_one = TokenHistory(tokens), TokenHistory([], 100)
    for token in tokens:
        one_by_one.extend((token,))
    for end in range(10, 3_000, 7):
        tail = tokens[max(0, end - 64) : end]
        match = at_once.find(tail)
        assert match is not None and match == one_by_one.find(tail)
    assert at_once.newest(50).tolist() == one_by_one.newest(50).tolist() == tokens[-50:]


def test_a_token_costs_24_bytes_at_most() -> None:
    history = TokenHistory(np.arange(100_000, dtype=np.int32))
    assert history.nbytes <= 24 * 100_000

"""What draws of the property tests of a history rarely reach: long matches, and the ends."""

import numpy as np

from hearth.worker.draft.token_history import SEPARATOR, Match, TokenHistory


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

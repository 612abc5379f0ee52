"""Drafts as others do, and as an oracle would: what Hearth's drafter is measured against.

Each is written anew from its description and behind Hearth's interface; the docstrings name it.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from hearth.worker.draft.draft import NO_DRAFT, Draft, Drafter, chain
from scripts.bench.drafts_replay import TokenAnswer

LOOKUP_TOKENS: Final = 10  # transformers' prompt_lookup_num_tokens, where it is on
LOOKUP_NGRAM: Final = 2  # transformers' max_matching_ngram_size
# llama.cpp's lookup: for n-grams of 1 to 4 tokens, how often one must have stood there and how
# large a part of what followed the likeliest must be.
NGRAM_COUNTS_MIN: Final = (2, 2, 1, 1)
NGRAM_PERCENT_MIN: Final = (66, 50, 50, 50)


class BaselineDrafter:
    """Knows all tokens so far and learns nothing; each kind says what follows them."""

    def __init__(self, answer: TokenAnswer) -> None:
        self.known: list[int] = []
        self.answer = answer
        self.take(answer.prompt)

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.known.append(token)
            self.index()

    def is_promising(self) -> bool:
        return True

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        found = self.following(tokens_max)
        return chain(found, ["history"] * len(found)) if found else NO_DRAFT

    def note(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        pass

    def index(self) -> None:
        """Take notice of the newest token."""

    def following(self, tokens_max: int) -> list[int]:
        """Return what may follow all tokens so far."""
        return []


class Oracle(BaselineDrafter):
    """Knows the answer, and lies about each token with a chance."""

    def __init__(self, answer: TokenAnswer, lies: float, draws: random.Random) -> None:
        super().__init__(answer)
        self._lies = lies
        self._draws = draws

    def following(self, tokens_max: int) -> list[int]:
        at = len(self.known) - len(self.answer.prompt)
        truth = self.answer.tokens[at : at + tokens_max]
        return [token + 1 if self._draws.random() < self._lies else token for token in truth]


class PromptLookup(BaselineDrafter):
    """Drafts what followed the first place where the last two tokens stood, or the last one.

    Source: transformers 5.24.0, `PromptLookupCandidateGenerator` with its defaults.
    """

    def __init__(self, answer: TokenAnswer) -> None:
        self._first_end: dict[tuple[int, ...], int] = {}
        super().__init__(answer)

    def index(self) -> None:
        end = len(self.known)
        for length in range(1, min(LOOKUP_NGRAM, end) + 1):
            self._first_end.setdefault(tuple(self.known[end - length :]), end)

    def following(self, tokens_max: int) -> list[int]:
        for length in range(LOOKUP_NGRAM, 0, -1):
            end = self._first_end.get(tuple(self.known[-length:]), len(self.known))
            if end < len(self.known):
                return self.known[end : end + min(tokens_max, LOOKUP_TOKENS)]
        return []


class NgramCache(BaselineDrafter):
    """Drafts token by token what mostly followed the longest known n-gram of up to four tokens.

    Source: llama.cpp 5c5f166e, `common/ngram-cache.cpp`, with the context's cache alone.
    """

    def __init__(self, answer: TokenAnswer) -> None:
        self._followed: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        super().__init__(answer)

    def index(self) -> None:
        *before, token = self.known[-len(NGRAM_COUNTS_MIN) - 1 :]
        for length in range(1, len(before) + 1):
            self._followed[tuple(before[-length:])][token] += 1

    def following(self, tokens_max: int) -> list[int]:
        drafted: list[int] = []
        tail = self.known[-len(NGRAM_COUNTS_MIN) :]
        while len(drafted) < tokens_max:
            token = self._likeliest(tail)
            if token is None:
                break
            drafted.append(token)
            tail = [*tail, token][-len(NGRAM_COUNTS_MIN) :]
        return drafted

    def _likeliest(self, tail: Sequence[int]) -> int | None:
        for length in range(len(tail), 0, -1):
            followed = self._followed.get(tuple(tail[-length:]))
            if not followed:
                continue
            token, count = followed.most_common(1)[0]
            total = followed.total()
            is_known = total >= NGRAM_COUNTS_MIN[length - 1]
            if is_known and 100 * count >= NGRAM_PERCENT_MIN[length - 1] * total:
                return token
        return None


class Lies:
    """Says of each token that another one is forced (`ForcedTokens`)."""

    def __init__(self, answer: TokenAnswer) -> None:
        self._answer = answer
        self._count = 0

    def take(self, tokens: Sequence[int]) -> None:
        self._count += len(tokens)

    def forced(self, tokens_max: int) -> list[int]:
        coming = self._answer.tokens[self._count : self._count + min(tokens_max, LOOKUP_TOKENS)]
        return [token + 1 for token in coming]

    def fitting(self, ahead: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[int]]:
        return len(tokens), []

    def choice(self, ahead: Sequence[int]) -> Callable[[int], bool] | None:
        return None


class AllWrong:
    """Drafts as another drafter does, but for the tokens: no one of them ever comes (`Drafter`)."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._draft = NO_DRAFT
        self.take = drafter.take
        self.is_promising = drafter.is_promising

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        self._draft = self._drafter.propose(tokens_max, waiting)
        return replace(self._draft, tokens=tuple(-2 - token for token in self._draft.tokens))

    def note(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        self._drafter.note(self._draft, accepted, rows)


BASELINES: Final[dict[str, Callable[[TokenAnswer], BaselineDrafter]]] = {
    "plain": BaselineDrafter,
    "transformers prompt lookup": PromptLookup,
    "llama.cpp lookup": NgramCache,
}

"""Decides how many tokens to draft, from what a row costs and from how many drafts were right.

Numbers only: nothing here knows of texts, models or clocks.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from hearth.worker.draft.draft import DraftSource

TextKind = Literal["thinking", "text", "call"]

ROWS_MAX: Final = 8  # of a forward: beyond, MLX's vector kernels give way to slower ones
# What a forward of so many rows costs, in forwards of one. Source: mlx issue 3839, an M4 Pro with
# 4-bit weights; on a CPU nothing better is known.
CPU_CURVE: Final[Mapping[int, float]] = {1: 1.0, 2: 1.1, 3: 1.3, 4: 1.48, 6: 2.05, 8: 2.5}
# What drafting brings where it works, in tokens for the cost of a plain one: what a row costs could
# have bought as much elsewhere, so that an accepted token must be worth that much of it.
_TOKENS_PER_COST: Final = 1.3
_GAIN_MIN: Final = 0.03  # tokens that a draft must promise beyond what its rows cost

# Lengths of matches that are counted together, by the shortest, and how many of their tokens are
# right before anything was learned.
_LENGTHS: Final = (0, 2, 3, 4, 6, 9, 17, 33)
_PRIORS: Final = (0.1, 0.3, 0.4, 0.5, 0.6, 0.75, 0.85, 0.93)
_FORCED_PRIOR: Final = 0.99
_MODEL_PRIOR: Final = 0.6  # a draft model's matches have no length: they are told by their place
_BUCKETS: Final = tuple(
    max(at for at, low in enumerate(_LENGTHS) if length >= low) for length in range(65)
)
_PRIOR_WEIGHT: Final = 4.0  # tried tokens that a prior counts for
_TRIED_MAX: Final = 32.0  # older ones than that are forgotten, by halves
_HARDLY_ANY: Final = 0.1  # right ones, of those tried or expected
_RATE_MAX: Final = 0.99

# Rows beyond a forward's tokens are bounded, whatever was learned.
_ALLOWED_FIRST: Final = 5.0
_ALLOWED_MAX: Final = 64.0
_ALLOWED_PER_TOKEN: Final = 0.03
_ALLOWED_PER_ACCEPTED: Final = 4.0
_PROBE_TOKENS: Final = 24  # between two probes at first; each that fails doubles it
_PROBE_TOKENS_MAX: Final = 96


class _Tally:
    """How many tokens were right, of how many that were tried or expected to be right."""

    __slots__ = ("of", "right")

    def __init__(self) -> None:
        self.right = self.of = 0.0

    def note(self, right: bool, weight: float) -> None:
        if right and self.right < _HARDLY_ANY * self.of:
            # Times seem to have changed: what was before counts little, so that the next ones tell.
            self.right, self.of = 0.0, min(self.of, _PRIOR_WEIGHT)
        self.right += right
        self.of += weight
        if self.of > _TRIED_MAX:
            self.right, self.of = self.right / 2, self.of / 2

    def towards(self, prior: float) -> float:
        return (self.right + _PRIOR_WEIGHT * prior) / (self.of + _PRIOR_WEIGHT)


class AcceptanceRates:
    """How many drafted tokens are right, by source, kind of text and length of the match.

    A length that was hardly tried is held for as good as its prior says, times how good the source
    has been for this kind of text, and that for as good as the source has been for all kinds.
    """

    def __init__(self) -> None:
        self._tallies: defaultdict[tuple[DraftSource | TextKind | int, ...], _Tally]
        self._tallies = defaultdict(_Tally)  # by source; by source and kind; by length beside
        self._rates: dict[tuple[DraftSource, TextKind, int], float] = {}  # until the next note

    def rate(self, source: DraftSource, kind: TextKind, length: int) -> float:
        """Return how likely a token is right that follows a match of `length`."""
        key = (source, kind, _BUCKETS[min(length, 64)])
        rate = self._rates.get(key)
        if rate is None:
            quality = self._tallies[key[:1]].towards(1.0)
            quality = self._tallies[key[:2]].towards(quality)
            prior = min(_prior(source, key[2]) * quality, _RATE_MAX)
            rate = self._rates[key] = self._tallies[key].towards(prior)
        return rate

    def note(self, source: DraftSource, kind: TextKind, length: int, right: bool) -> None:
        key = (source, kind, _BUCKETS[min(length, 64)])
        expected = _prior(source, key[2])
        self._tallies[key].note(right, 1.0)
        self._tallies[key[:2]].note(right, expected)
        self._tallies[key[:1]].note(right, expected)
        self._rates.clear()


def _prior(source: DraftSource, bucket: int) -> float:
    if source == "forced":
        return _FORCED_PRIOR
    return _MODEL_PRIOR if source == "model" else _PRIORS[bucket]


def costs_of(curve: Mapping[int, float], rows_max: int = 4 * ROWS_MAX) -> tuple[float, ...]:
    """Return what forwards of 0, 1, 2, ... rows cost: between points of the curve, on a line."""
    points = sorted(curve.items())
    assert points[0][0] == 1 and len(points) > 1, curve
    costs = [0.0]
    for rows in range(1, rows_max + 1):
        at = next((at for at in range(1, len(points)) if points[at][0] >= rows), len(points) - 1)
        (low, cost), (high, more) = points[at - 1], points[at]
        costs.append((cost + (more - cost) * (rows - low) / (high - low)) / points[0][1])
    return tuple(costs)


class DraftLength:
    """How long drafts may be for one API key's answers: learns from each that was verified.

    Invariant: rows in vain are at most `_ALLOWED_FIRST` and `_ALLOWED_PER_TOKEN` of the tokens,
    and those of one forward, but for what right ones have earned. Owner: the inference thread.
    """

    def __init__(self, curve: Mapping[int, float] = CPU_CURVE) -> None:
        self.rates = AcceptanceRates()
        self._costs = costs_of(curve)
        self._allowed = _ALLOWED_FIRST
        self._since_probe = 0
        self._probe_tokens = _PROBE_TOKENS
        self._feeds_again = False  # the model feeds what was accepted again behind a rejected node

    def cost(self, rows: int) -> float:
        """Return what a forward of so many rows costs, in forwards of one."""
        return self._costs[min(rows, len(self._costs) - 1)]

    def take(self, count: int) -> None:
        """Take notice of so many tokens."""
        self._since_probe += count
        self._allowed = min(self._allowed + count * _ALLOWED_PER_TOKEN, _ALLOWED_MAX)

    @property
    def is_probe_due(self) -> bool:
        """Whether one token is drafted that is not worth it, to see whether that has changed."""
        return self._since_probe >= self._probe_tokens and self._allowed >= 1

    def is_worth(self, chance: float, token_cost: float = 0.0) -> bool:
        """Whether a token as likely as that is worth a row beside the one that is fed anyway.

        `token_cost` is what drafting it takes, in forwards of one row.
        """
        return self._allowed >= 1 and self._best((chance,), 1, token_cost)[1] > 0

    def gain(
        self, chances: Sequence[float], waiting: int, token_cost: float = 0.0
    ) -> tuple[float, int]:
        """Return the tokens that nodes promise beyond what they cost, and how many of them do.

        The arguments are those of `count`, which allows no more.
        """
        gain, count = self._best(self._allowed_of(chances, waiting), waiting, token_cost)
        return (gain, count) if count else (0.0, 0)

    def count(self, chances: Sequence[float], waiting: int, token_cost: float = 0.0) -> int:
        """Return how many nodes are worth their rows, of some that are right with such chances.

        The chances are those of being on the path that is accepted, and do not rise. `waiting`
        rows are fed in any case. `token_cost` is what drafting each takes, in forwards of one row.
        """
        self._feeds_again = self._feeds_again or waiting > 1
        allowed = self._allowed_of(chances, waiting)
        _, choice = self._best(allowed, waiting, token_cost)
        if not choice and allowed and self.is_probe_due:
            self._since_probe = 0
            self._probe_tokens = min(2 * self._probe_tokens, _PROBE_TOKENS_MAX)
            return 1
        return choice

    def note(self, accepted: int, rows: int) -> None:
        """Take notice of a forward: how many drafted tokens were right, of how many rows it was."""
        if accepted:
            self._probe_tokens = _PROBE_TOKENS
        earned = self._allowed + accepted * _ALLOWED_PER_ACCEPTED
        self._allowed = min(earned, _ALLOWED_MAX) - (rows - 1 - accepted)

    def _allowed_of(self, chances: Sequence[float], waiting: int) -> Sequence[float]:
        return chances[: max(0, min(ROWS_MAX - waiting, int(self._allowed)))]

    def _best(self, chances: Sequence[float], waiting: int, token_cost: float) -> tuple[float, int]:
        best, choice, tokens, again, likely = _GAIN_MIN, 0, 0.0, 0.0, 1.0
        for count, chance in enumerate(chances, 1):
            tokens += chance
            if self._feeds_again:  # if this node is the first wrong one
                again += (likely - chance) * (self.cost(waiting + count) - 1)
            likely = chance
            extra = self.cost(waiting + count) - self.cost(waiting) + again + count * token_cost
            if tokens - extra * _TOKENS_PER_COST > best:
                best, choice = tokens - extra * _TOKENS_PER_COST, count
        return best, choice

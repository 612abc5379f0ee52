"""Decides how many tokens to draft, by the cost of a row and the acceptance of earlier drafts.

This module handles numbers only, no texts, models or clocks. A row is one token of a forward.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from hearth.worker.draft.draft import DraftSource

TextKind = Literal["thinking", "text", "call"]

ROWS_MAX: Final = 8  # rows of a forward; for more rows MLX uses slower kernels
# The cost of a forward by its rows, in forwards of one row. Source: mlx issue 3839, an M4 Pro with
# 4-bit weights. No better numbers are known for a CPU.
CPU_CURVE: Final[Mapping[int, float]] = {1: 1.0, 2: 1.1, 3: 1.3, 4: 1.48, 6: 2.05, 8: 2.5}
# Tokens that good drafts yield for the cost of one plain forward. A bad draft takes budget from
# good ones, so the cost of a draft is multiplied by this.
_TOKENS_PER_COST: Final = 1.3
_GAIN_MIN: Final = 0.03  # tokens that a draft must promise beyond the cost of its rows

# Matches are counted in classes of length, each named by its shortest length. A prior is the share
# of tokens that is expected to be accepted before anything is learned.
_LENGTHS: Final = (0, 2, 3, 4, 6, 9, 17, 33)
_PRIORS: Final = (0.1, 0.3, 0.4, 0.5, 0.6, 0.75, 0.85, 0.93)
_FORCED_PRIOR: Final = 0.99
_MODEL_PRIOR: Final = 0.6  # for a draft model, which has no matches
_BUCKETS: Final = tuple(
    max(at for at, low in enumerate(_LENGTHS) if length >= low) for length in range(65)
)
_PRIOR_WEIGHT: Final = 4.0  # a prior counts as this many tried tokens
_TRIED_MAX: Final = 32.0  # tried tokens after which both counts are halved
_HARDLY_ANY: Final = 0.1  # below this share of right tokens a right one resets the counts
_RATE_MAX: Final = 0.99

# The budget of rejected rows limits drafts, whatever was learned.
_ALLOWED_FIRST: Final = 5.0
_ALLOWED_MAX: Final = 64.0
_ALLOWED_PER_TOKEN: Final = 0.03
_ALLOWED_PER_ACCEPTED: Final = 4.0
_PROBE_TOKENS: Final = 24  # tokens between two probes; each failed probe doubles them
_PROBE_TOKENS_MAX: Final = 96


class _Tally:
    """Counts right tokens, and the tokens that were tried or expected to be right."""

    __slots__ = ("right", "tried")

    def __init__(self) -> None:
        self.right = self.tried = 0.0

    def record(self, right: bool, weight: float) -> None:
        if right and self.right < _HARDLY_ANY * self.tried:
            # The text seems to have changed, so the earlier counts are reduced to a small weight.
            self.right, self.tried = 0.0, min(self.tried, _PRIOR_WEIGHT)
        self.right += right
        self.tried += weight
        if self.tried > _TRIED_MAX:
            self.right, self.tried = self.right / 2, self.tried / 2

    def towards(self, prior: float) -> float:
        return (self.right + _PRIOR_WEIGHT * prior) / (self.tried + _PRIOR_WEIGHT)


class AcceptanceRates:
    """Learns how many drafted tokens are right, by source, kind of text and length of the match.

    A length with few tries gets its prior, times the source's quality for this kind of text. A kind
    with few tries gets the source's quality for all kinds.
    """

    def __init__(self) -> None:
        self._tallies: defaultdict[tuple[DraftSource | TextKind | int, ...], _Tally]
        self._tallies = defaultdict(_Tally)  # by source, (source, kind), (source, kind, length)
        self._rates: dict[tuple[DraftSource, TextKind, int], float] = {}  # until the next `record`

    def rate(self, source: DraftSource, kind: TextKind, length: int) -> float:
        """Return the probability that a token after a match of `length` is right."""
        key = (source, kind, _BUCKETS[min(length, 64)])
        rate = self._rates.get(key)
        if rate is None:
            quality = self._tallies[key[:1]].towards(1.0)
            quality = self._tallies[key[:2]].towards(quality)
            prior = min(_prior(source, key[2]) * quality, _RATE_MAX)
            rate = self._rates[key] = self._tallies[key].towards(prior)
        return rate

    def record(self, source: DraftSource, kind: TextKind, length: int, right: bool) -> None:
        key = (source, kind, _BUCKETS[min(length, 64)])
        expected = _prior(source, key[2])
        self._tallies[key].record(right, 1.0)
        self._tallies[key[:2]].record(right, expected)
        self._tallies[key[:1]].record(right, expected)
        self._rates.clear()


def _prior(source: DraftSource, bucket: int) -> float:
    if source == "forced":
        return _FORCED_PRIOR
    return _MODEL_PRIOR if source == "model" else _PRIORS[bucket]


def costs_of(curve: Mapping[int, float], rows_max: int = 4 * ROWS_MAX) -> tuple[float, ...]:
    """Return the costs of forwards of 0, 1, 2, ... rows, by linear interpolation of the curve."""
    points = sorted(curve.items())
    assert points[0][0] == 1 and len(points) > 1, curve
    costs = [0.0]
    for rows in range(1, rows_max + 1):
        at = next((at for at in range(1, len(points)) if points[at][0] >= rows), len(points) - 1)
        (low, low_cost), (high, high_cost) = points[at - 1], points[at]
        costs.append(
            (low_cost + (high_cost - low_cost) * (rows - low) / (high - low)) / points[0][1]
        )
    return tuple(costs)


class DraftLength:
    """Decides the length of drafts for one API key's answers, and learns from verified drafts.

    Invariant: the rejected rows are at most the sum of `_ALLOWED_FIRST`, `_ALLOWED_PER_TOKEN` for
    each token, `_ALLOWED_PER_ACCEPTED` for each accepted token, and the rows of one forward.
    Owner: the inference thread.
    """

    def __init__(self, curve: Mapping[int, float] = CPU_CURVE) -> None:
        self.rates = AcceptanceRates()
        self._costs = costs_of(curve)
        self._allowed = _ALLOWED_FIRST
        self._since_probe = 0
        self._probe_tokens = _PROBE_TOKENS
        self._feeds_again = (
            False  # whether a rejected node makes the model feed accepted nodes again
        )

    def cost(self, rows: int) -> float:
        """Return the cost of a forward of `rows`, in forwards of one row."""
        return self._costs[min(rows, len(self._costs) - 1)]

    def count_tokens(self, count: int) -> None:
        """Count tokens of answers: they add to the budget, and bring the next probe nearer."""
        self._since_probe += count
        self._allowed = min(self._allowed + count * _ALLOWED_PER_TOKEN, _ALLOWED_MAX)

    @property
    def is_probe_due(self) -> bool:
        """Whether to draft one token at a loss, to see if acceptance has changed."""
        return self._since_probe >= self._probe_tokens and self._allowed >= 1

    def is_worth(self, chance: float, token_cost: float = 0.0) -> bool:
        """Whether a token that is right with `chance` is worth a row in the next forward.

        `token_cost` is the cost of drafting the token, in forwards of one row.
        """
        return self._allowed >= 1 and self._best((chance,), 1, token_cost)[1] > 0

    def gain(
        self, chances: Sequence[float], known_rows: int, token_cost: float = 0.0
    ) -> tuple[float, int]:
        """Return the tokens that a draft promises beyond its cost, and the best number of nodes.

        The arguments are those of `count`. Both results are 0 where no node pays.
        """
        gain, count = self._best(self._allowed_of(chances, known_rows), known_rows, token_cost)
        return (gain, count) if count else (0.0, 0)

    def count(self, chances: Sequence[float], known_rows: int, token_cost: float = 0.0) -> int:
        """Return how many of the first nodes are worth their rows.

        `chances` are the nodes' chances of acceptance, in falling order. The forward feeds
        `known_rows` in any case. `token_cost` is the cost of drafting one node, in forwards of one
        row.
        """
        self._feeds_again = self._feeds_again or known_rows > 1
        allowed = self._allowed_of(chances, known_rows)
        _, choice = self._best(allowed, known_rows, token_cost)
        if not choice and allowed and self.is_probe_due:
            self._since_probe = 0
            self._probe_tokens = min(2 * self._probe_tokens, _PROBE_TOKENS_MAX)
            return 1
        return choice

    def record(self, accepted: int, rows: int) -> None:
        """Learn from a forward of `rows`, with `accepted` drafted tokens."""
        if accepted:
            self._probe_tokens = _PROBE_TOKENS
        earned = self._allowed + accepted * _ALLOWED_PER_ACCEPTED
        self._allowed = min(earned, _ALLOWED_MAX) - (rows - 1 - accepted)

    def _allowed_of(self, chances: Sequence[float], known_rows: int) -> Sequence[float]:
        return chances[: max(0, min(ROWS_MAX - known_rows, int(self._allowed)))]

    def _best(
        self, chances: Sequence[float], known_rows: int, token_cost: float
    ) -> tuple[float, int]:
        best, choice, tokens, again, likely = _GAIN_MIN, 0, 0.0, 0.0, 1.0
        for count, chance in enumerate(chances, 1):
            tokens += chance
            if self._feeds_again:  # the cost if this node is the first wrong one
                again += (likely - chance) * (self.cost(known_rows + count) - 1)
            likely = chance
            extra = (
                self.cost(known_rows + count) - self.cost(known_rows) + again + count * token_cost
            )
            if tokens - extra * _TOKENS_PER_COST > best:
                best, choice = tokens - extra * _TOKENS_PER_COST, count
        return best, choice

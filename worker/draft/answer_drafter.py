"""Drafts for answers from forced tokens, from earlier text, and from a draft model.

This module handles tokens only, no models and no arrays.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter, mul
from typing import Final, NamedTuple

from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.worker.draft.draft import NO_DRAFT, Draft, DraftSource, ForcedTokens, ModelDrafts
from hearth.worker.draft.draft_length import CPU_CURVE, ROWS_MAX, DraftLength, TextKind
from hearth.worker.draft.token_history import SEPARATOR, TokenHistory, TokenLookup

HISTORY_TOKENS_MAX: Final = 1 << 18  # indexed tokens of a conversation, the newest
_ANSWER_ROOM: Final = 4_096  # capacity for an answer's tokens at first
PREDICTION_TOKENS_MAX: Final = 1 << 17  # indexed tokens of a client's prediction
# Number of tokens after an accepted draft in which another draft is likely.
_PROMISING_TOKENS: Final = 8
OWNERS_MAX: Final = 64  # API keys with remembered rates, about 10 KB each
BYTES_MAX: Final = 8 << 20  # all API keys' answers together, about 350,000 tokens
TOKENS_MIN: Final = 16  # a shorter answer would save less than keeping it costs
_CHANCE_MIN: Final = 0.05  # a chain ends with the first node below this chance


@dataclass(slots=True)
class DraftCounts:
    """Counts drafted and accepted tokens. Owner: the inference thread."""

    drafted: Counter[DraftSource] = field(default_factory=Counter)
    accepted: Counter[DraftSource] = field(default_factory=Counter)
    tokens: int = 0
    rows: int = 0  # rows of all forwards
    saved: float = 0.0  # estimated saving, in forwards of one row

    @property
    def forwards(self) -> int:
        """The number of forwards that computed the tokens."""
        return self.tokens - self.accepted.total()

    def add(self, other: "DraftCounts") -> None:
        self.drafted.update(other.drafted)
        self.accepted.update(other.accepted)
        self.tokens += other.tokens
        self.rows += other.rows
        self.saved += other.saved


@dataclass(frozen=True, slots=True)
class AnswerSources:
    """The texts and models that the drafts of one answer come from."""

    prompt: Sequence[int]
    earlier_answers: Callable[[], TokenHistory | None] = lambda: None  # those to the same API key
    prediction: Sequence[int] = ()  # the client's guess of the answer
    forced: ForcedTokens | None = None
    looks_up: bool = True  # False = no drafts from text
    model: ModelDrafts | None = None


class _Node(NamedTuple):
    """A node of a draft."""

    token: int
    parent: int
    source: DraftSource
    length: int  # length of the match before the token
    chance: float  # probability that the node is accepted


class AnswerDrafter:
    """Drafts for one answer (`draft.Drafter`). Owner: the inference thread."""

    def __init__(
        self,
        sources: AnswerSources,
        length: DraftLength,
        kind: Callable[[], TextKind],
        allows_trees: bool = False,
    ) -> None:
        """`kind` returns the kind of text that comes next."""
        self.counts = DraftCounts()
        self.answer: list[int] = []
        self._sources = sources
        self._length = length
        self.rates = length.rates
        self.model = sources.model  # the draft model's drafts of this answer
        self._kind = kind
        self._allows_trees = allows_trees
        self._history: TokenHistory | None = None
        self._prediction = sources.prediction[:PREDICTION_TOKENS_MAX]  # not indexed yet
        # Of several lookups with the longest match, the first one is followed.
        self._lookups = [TokenLookup("history", lambda: self._history, is_own=True)]
        if sources.looks_up:
            self._lookups.append(TokenLookup("answers", sources.earlier_answers))
        self._since_accepted = _PROMISING_TOKENS  # tokens since the last accepted draft
        self._unverified_rows = 0  # known rows before a proposed draft; 0 once verified
        self._proposed: list[_Node] = []
        self._proposed_kind: TextKind = "text"
        self._accepted: list[DraftSource] = []  # sources of the last draft's accepted nodes

    # ------------------------------------------------------------ the engine's calls

    def take(self, tokens: Sequence[int]) -> None:
        """Append the answer's next tokens."""
        if self._unverified_rows:  # the engine did not use the proposed draft
            self._record_plain(self._unverified_rows)
        self.answer.extend(tokens)
        self._length.count_tokens(len(tokens))
        self._since_accepted += len(tokens)
        self.counts.tokens += len(tokens)
        self.counts.rows += len(tokens)
        if self._sources.forced is not None:
            self._sources.forced.take(tokens)
        for token in tokens:
            for lookup in self._lookups:
                lookup.take(token)
        if self._history is not None:
            self._history.extend(tokens)
            if len(self._history) > HISTORY_TOKENS_MAX:
                self._history = None  # rebuilt for the next draft

    def is_promising(self) -> bool:
        """Whether a draft is likely after the token that is being computed now."""
        length, kind, model = self._length, self._kind(), self.model
        if self._since_accepted < _PROMISING_TOKENS:
            return True
        if kind == "call" and self._sources.forced is not None:
            return length.is_worth(self.rates.rate("forced", kind, 0)) or length.is_probe_due
        if model is not None:
            rate = self.rates.rate("model", kind, 0)
            if length.is_worth(rate, model.token_cost) or length.is_probe_due:
                return True
        lookup = self._longest(self._tail())
        rate = self.rates.rate(lookup.source, kind, lookup.length)
        return bool(lookup.length) and (length.is_worth(rate) or length.is_probe_due)

    def propose(self, tokens_max: int, known_rows: int) -> Draft:
        """Return a draft that continues all tokens so far. See `draft.Drafter`."""
        nodes_max = min(tokens_max, ROWS_MAX - known_rows)
        self._proposed_kind = self._kind()
        nodes = self._nodes(nodes_max) if nodes_max > 0 else []
        model_nodes = self._nodes_of_model(nodes, nodes_max, known_rows)
        cost = self.model.token_cost if model_nodes and self.model else 0.0
        nodes = model_nodes or nodes
        count = self._length.count([node.chance for node in nodes], known_rows, cost)
        if not count:
            self._record_plain(known_rows)
            return NO_DRAFT
        self._proposed, self._unverified_rows = nodes[:count], known_rows
        return Draft(
            tuple(node.token for node in self._proposed),
            tuple(node.parent for node in self._proposed),
            tuple(node.source for node in self._proposed),
        )

    def record(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        """Learn which nodes of the draft a forward of `rows` tokens accepted."""
        right, self._unverified_rows = set(accepted), 0
        self.counts.drafted.update(draft.sources)
        self._accepted = [draft.sources[node] for node in accepted]
        self.counts.accepted.update(self._accepted)
        self.counts.rows += rows - 1 - len(right)
        self.counts.saved += len(right) + 1 - self._length.cost(rows)
        self._length.record(len(right), rows)
        if right:
            # `take` is called next, with the accepted tokens and the token after them.
            self._since_accepted = -1 - len(right)
        path = -1
        for at, node in enumerate(self._proposed[: len(draft)]):
            # Children of a wrong node, and later siblings of a right one, were not tested.
            if node.parent == path:
                kind = self._proposed_kind
                self.rates.record(node.source, kind, node.length, at in right)
                path = at if at in right else path

    def end_at(self, count: int) -> None:
        """End the answer after `count` tokens. Later accepted tokens count as rejected.

        The indexes are dropped, as the request may be kept for a while.
        """
        self._history, self._lookups = None, []
        surplus = self.counts.tokens - count
        assert 0 <= surplus <= len(self._accepted), (surplus, len(self._accepted))
        if surplus:
            self.counts.accepted.subtract(self._accepted[-surplus:])
            self.counts.tokens -= surplus
            self.counts.saved -= surplus

    def _record_plain(self, known_rows: int) -> None:
        """Count a forward of `known_rows` without a draft. All rows but one yield no token."""
        self._unverified_rows = 0
        if known_rows > 1:
            self.counts.rows += known_rows - 1
            self.counts.saved += 1 - self._length.cost(known_rows)
            self._length.record(0, known_rows)

    # ------------------------------------------------------------ the conversation

    def _tail(self) -> list[int]:
        """Return the last known tokens, to look up a match.

        The first call indexes prompt and prediction: answers in a batch never need the index.
        """
        if not self._sources.looks_up:
            return []
        history = self._history
        if history is None:
            kept = HISTORY_TOKENS_MAX * 3 // 4
            known = [*self._sources.prompt[-kept:], *self.answer][-kept:]
            history = self._history = TokenHistory(known, len(known) + _ANSWER_ROOM)
            if self._prediction:
                # The lookup takes the answer so far, to reach the same point of the prediction.
                predicted, self._prediction = TokenHistory(self._prediction), ()
                lookup = TokenLookup("prediction", lambda: predicted, from_start=True)
                for token in self.answer:
                    lookup.take(token)
                self._lookups.insert(1, lookup)  # preferred to earlier answers
        return history.tail()

    def _longest(self, tail: list[int]) -> TokenLookup:
        """Return the lookup with the longest match."""
        for lookup in self._lookups:
            lookup.look_up(tail)
        return max(self._lookups, key=lambda lookup: lookup.length)

    # ------------------------------------------------------------ the draft

    def _nodes(self, nodes_max: int) -> list[_Node]:
        """Return at most `nodes_max` nodes from the grammar and from text, the likeliest first."""
        forced = self._sources.forced
        nodes = self._chain([], forced.forced(nodes_max), "forced", 0) if forced is not None else []
        if forced is None or (not nodes and self._proposed_kind != "call"):
            # The tokens after the longest match, and perhaps a branch.
            tail = self._tail()
            longest = self._longest(tail)
            nodes = self._chain([], longest.next_tokens(nodes_max), longest.source, longest.length)
            if self._allows_trees and nodes and self._proposed_kind != "call":
                nodes = self._with_branch(nodes, tail)[:nodes_max]
            return nodes
        may_continue = True
        while may_continue and len(nodes) < nodes_max:
            nodes, may_continue = self._with_fitting(nodes, forced, nodes_max)
        return nodes

    def _with_fitting(
        self, nodes: list[_Node], forced: ForcedTokens, nodes_max: int
    ) -> tuple[list[_Node], bool]:
        """Append to a chain those tokens after a match that the grammar allows.

        Tokens that the grammar forces next are appended too. The second value is True if tokens
        were forced: then more may follow.
        """
        ahead = [node.token for node in nodes]
        tokens, length, source = self._behind(ahead, self._tail(), nodes_max - len(nodes))
        count, then = forced.fitting(ahead, tokens)
        if not count and (fits := forced.choice(ahead)) is not None:
            # Only few tokens may come: take the one that last followed the same two tokens.
            tail = [*self._tail()[-2:], *ahead][-2:]
            candidates = [
                (*lookup.fitting_token(tail, fits), lookup.source) for lookup in self._lookups
            ]
            tokens, length, source = max(candidates, key=itemgetter(1))
            count, then = forced.fitting(ahead, tokens)
        nodes = self._chain(nodes, tokens[:count], source, length)
        is_likely = len(nodes) == len(ahead) + count and (
            not nodes or nodes[-1].chance > _CHANCE_MIN
        )
        if not then or not is_likely:
            return nodes, False
        longer = self._chain(nodes, then[: nodes_max - len(nodes)], "forced", 0)
        return longer, longer[-1].chance > _CHANCE_MIN

    def _nodes_of_model(self, others: list[_Node], nodes_max: int, known_rows: int) -> list[_Node]:
        """Return the draft model's nodes if they promise more than the `others`.

        The model drafts only as many tokens as pay, and none where tokens are forced.
        """
        model, length = self.model, self._length
        if (
            model is None
            or not self.answer
            or nodes_max < 1
            or (others and others[0].source == "forced")
        ):
            return []
        rates, kind, cost = length.rates, self._proposed_kind, model.token_cost
        chances = list(
            itertools.accumulate((rates.rate("model", kind, at) for at in range(nodes_max)), mul)
        )
        gain, count = length.gain(chances, known_rows, cost)
        other_gain, _ = length.gain([node.chance for node in others], known_rows)
        is_probe = not other_gain and length.is_probe_due
        if gain <= other_gain and not (is_probe and (not others or chances[0] > others[0].chance)):
            return []
        position = len(self._sources.prompt) + len(self.answer) - 1
        tokens = model.draft(position, self.answer[-1], max(count, 1))
        self.counts.saved -= len(tokens) * cost
        return self._chain([], tokens, "model", 0)

    def _behind(
        self, ahead: list[int], tail: list[int], count: int
    ) -> tuple[list[int], int, DraftSource]:
        """Return the tokens after the longest match, and the match's length and source."""
        longest = self._longest(tail)
        if not ahead:
            return longest.next_tokens(count), longest.length, longest.source
        matches = [(*lookup.behind(ahead, tail, count), lookup.source) for lookup in self._lookups]
        return max(matches, key=itemgetter(1))

    def _chain(
        self,
        nodes: list[_Node],
        tokens: Sequence[int],
        source: DraftSource,
        length: int,
        depth: int | None = None,
    ) -> list[_Node]:
        """Return the chain `nodes`, continued by the tokens after a match of `length`.

        With a `depth` the tokens are a branch after the first `depth` nodes, taken if the node
        `depth` is wrong.
        """
        rates, kind, longer = self.rates, self._proposed_kind, list(nodes)
        parent = (len(nodes) if depth is None else depth) - 1
        chance = nodes[parent].chance if parent >= 0 else 1.0
        if depth is not None:
            chance -= nodes[depth].chance
        for at, token in enumerate(tokens):
            chance *= rates.rate(source, kind, length + at)
            longer.append(_Node(token, parent, source, length + at, chance))
            parent = len(longer) - 1
            if chance < _CHANCE_MIN:
                break
        return longer

    def _with_branch(self, nodes: list[_Node], tail: list[int]) -> list[_Node]:
        """Return a chain with the best branch: another match's tokens from the first difference.

        The nodes are in order of their chance, each after its parent.
        """
        best, end = nodes, len(nodes)
        for lookup in self._lookups:
            others = lookup.other_tokens(nodes[0].token, tail, end)
            for tokens, length in ((lookup.next_tokens(end), lookup.length), others):
                pairs = zip(nodes, tokens, strict=False)
                alike = itertools.takewhile(lambda pair: pair[0].token == pair[1], pairs)
                depth = sum(1 for _ in alike)
                if depth < min(end, len(tokens)):
                    tree = self._chain(nodes, tokens[depth:], lookup.source, length + depth, depth)
                    if best is nodes or tree[end].chance > best[end].chance:
                        best = tree
        order = sorted(range(len(best)), key=lambda at: (-best[at].chance, at))
        new_index = {at: index for index, at in enumerate(order)} | {-1: -1}
        return [best[at]._replace(parent=new_index[best[at].parent]) for at in order]


class DraftMemory:
    """Keeps earlier answers and learned rates by API key, about 9 MB at most.

    The answers and rates of an API key serve that key alone: otherwise the speed of an answer could
    show another client that the text was written before. When there are too many answers, the API
    key with the most bytes loses the older half of its answers. So a key with less than an equal
    share loses nothing through others. In addition, each drafted answer has an index of its
    conversation and prediction, with 24 bytes per token: a thousandth of the KV.
    Invariant: `nbytes` is at most the constructor's `bytes_max`. Owner: the inference thread.
    """

    def __init__(self, curve: Mapping[int, float] = CPU_CURVE, bytes_max: int = BYTES_MAX) -> None:
        """`curve` maps a forward's rows to its cost."""
        self.counts = DraftCounts()  # counts of all ended answers
        self._curve = curve
        self._bytes_max = bytes_max
        # Kept for one key: tokens of answers, 8 MB
        self._answers: dict[str, TokenHistory] = {}
        # Kept for one key: how well answers could be drafted
        self._lengths: MemoryByOwner[str, DraftLength] = MemoryByOwner(OWNERS_MAX)

    @property
    def nbytes(self) -> int:
        """Bytes of all kept tokens and their tables."""
        return sum(history.nbytes for history in self._answers.values())

    def begin(
        self,
        api_key: str | None,
        sources: AnswerSources,
        kind: Callable[[], TextKind],
        allows_trees: bool = False,
    ) -> AnswerDrafter:
        """Return the drafter of a new answer.

        `sources` come from the request; the kept answers to `api_key` are added. If `api_key` is
        None, no kept answers or rates are used, and nothing is kept.
        """
        if api_key is None:
            return AnswerDrafter(sources, DraftLength(self._curve), kind, allows_trees)
        sources = replace(sources, earlier_answers=lambda: self.answers_of(api_key))
        length = self._lengths.get(api_key, "") or DraftLength(self._curve)
        self._lengths.put(api_key, "", length)
        return AnswerDrafter(sources, length, kind, allows_trees)

    def answers_of(self, api_key: str) -> TokenHistory | None:
        """Return the kept answers to `api_key`, the newest last. Callers must not change them."""
        return self._answers.get(api_key)

    def keep(self, api_key: str, answer: Sequence[int]) -> None:
        """Keep an answer for later answers to its API key, unless it is too short."""
        if len(answer) < TOKENS_MIN:
            return
        self._answers.setdefault(api_key, TokenHistory()).extend([*answer, SEPARATOR])
        while self.nbytes > self._bytes_max:
            largest, history = max(self._answers.items(), key=lambda item: item[1].nbytes)
            newer = TokenHistory(history.newest(len(history) // 2))
            if newer.nbytes < history.nbytes:
                self._answers[largest] = newer
            else:
                del self._answers[largest]

    def clear(self) -> None:
        """Remove all kept answers and rates."""
        self._answers.clear()
        self._lengths.clear()

"""Drafts for answers: what their grammar forces, and what followed the last time, in bounds.

Tokens alone: nothing here knows a model or an array of one.
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

# The newest tokens of a conversation that are looked up, and what an answer adds to them at first.
HISTORY_TOKENS_MAX: Final = 1 << 18
_ANSWER_ROOM: Final = 4_096
PREDICTION_TOKENS_MAX: Final = 1 << 17  # that are looked up
# Behind an accepted draft the next one is seldom far, so that its tokens are waited for.
_PROMISING_TOKENS: Final = 8
OWNERS_MAX: Final = 64  # whose rates are remembered: some 10 KB each
BYTES_MAX: Final = 8 << 20  # of all owners' answers together, some 350,000 tokens
TOKENS_MIN: Final = 16  # of an answer: a shorter one spares less than it takes
_CHANCE_MIN: Final = 0.05  # of the last node of a chain: nothing behind a less likely one


@dataclass(slots=True)
class DraftCounts:
    """Counts what drafting did. Owner: the inference thread."""

    drafted: Counter[DraftSource] = field(default_factory=Counter)
    accepted: Counter[DraftSource] = field(default_factory=Counter)
    tokens: int = 0
    rows: int = 0  # of all forwards
    saved: float = 0.0  # estimated, in forwards of one row

    @property
    def forwards(self) -> int:
        """Forwards in which the tokens were computed."""
        return self.tokens - self.accepted.total()

    def add(self, other: "DraftCounts") -> None:
        self.drafted.update(other.drafted)
        self.accepted.update(other.accepted)
        self.tokens += other.tokens
        self.rows += other.rows
        self.saved += other.saved


@dataclass(frozen=True, slots=True)
class AnswerSources:
    """Where the drafts of one answer come from."""

    prompt: Sequence[int]
    earlier_answers: Callable[[], TokenHistory | None] = lambda: None  # of the same API key
    prediction: Sequence[int] = ()  # the client's guess of the answer
    forced: ForcedTokens | None = None
    looks_up: bool = True  # False = what is forced, and nothing from text
    model: ModelDrafts | None = None


class _Node(NamedTuple):
    """A token that may come, and how likely it is that it is accepted."""

    token: int
    parent: int
    source: DraftSource
    length: int  # of the match that it follows
    chance: float


class AnswerDrafter:
    """Drafts for one answer (`draft.Drafter`). Owner: the inference thread."""

    def __init__(
        self,
        sources: AnswerSources,
        length: DraftLength,
        kind: Callable[[], TextKind],
        allows_trees: bool = False,
    ) -> None:
        """`kind` tells what kind of text comes next."""
        self.counts = DraftCounts()
        self.answer: list[int] = []
        self._sources = sources
        self._length = length
        self.rates = length.rates
        self.model = sources.model  # the draft model that follows this answer
        self._kind = kind
        self._allows_trees = allows_trees
        self._history: TokenHistory | None = None
        self._prediction = sources.prediction[:PREDICTION_TOKENS_MAX]  # not indexed yet
        # The first of those with matches of one length is followed.
        self._lookups = [TokenLookup("history", lambda: self._history, is_own=True)]
        if sources.looks_up:
            self._lookups.append(TokenLookup("answers", sources.earlier_answers))
        self._since_accepted = _PROMISING_TOKENS  # tokens
        self._waiting = 0  # rows beside a proposed draft of which nothing was told yet
        self._proposed: list[_Node] = []
        self._proposed_kind: TextKind = "text"
        self._accepted: list[DraftSource] = []  # of the last draft that was verified

    # ------------------------------------------------------------ what the engine asks

    def take(self, tokens: Sequence[int]) -> None:
        """Take the answer's next tokens."""
        if self._waiting:  # the engine has verified nothing of what was proposed
            self._note_plain(self._waiting)
        self.answer.extend(tokens)
        self._length.take(len(tokens))
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
                self._history = None  # the next draft makes it anew

    def is_promising(self) -> bool:
        """Whether a draft may be had once the next token, which is computed now, is known."""
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

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        """Return what may come behind all tokens so far."""
        most = min(tokens_max, ROWS_MAX - waiting)
        self._proposed_kind = self._kind()
        nodes = self._nodes(most) if most > 0 else []
        of_model = self._nodes_of_model(nodes, most, waiting)
        cost = self.model.token_cost if of_model and self.model else 0.0
        nodes = of_model or nodes
        count = self._length.count([node.chance for node in nodes], waiting, cost)
        if not count:
            self._note_plain(waiting)
            return NO_DRAFT
        self._proposed, self._waiting = nodes[:count], waiting
        return Draft(
            tuple(node.token for node in self._proposed),
            tuple(node.parent for node in self._proposed),
            tuple(node.source for node in self._proposed),
        )

    def note(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        """Learn which of the draft's nodes were right, and the rows of the forward that told so."""
        right, self._waiting = set(accepted), 0
        self.counts.drafted.update(draft.sources)
        self._accepted = [draft.sources[node] for node in accepted]
        self.counts.accepted.update(self._accepted)
        self.counts.rows += rows - 1 - len(right)
        self.counts.saved += len(right) + 1 - self._length.cost(rows)
        self._length.note(len(right), rows)
        if right:
            self._since_accepted = -1 - len(right)  # which are taken next, and the one behind them
        path = -1
        for at, node in enumerate(self._proposed[: len(draft)]):
            # Nothing is known of what hangs from a wrong node or stands beside a right one.
            if node.parent == path:
                kind = self._proposed_kind
                self.rates.note(node.source, kind, node.length, at in right)
                path = at if at in right else path

    def end_at(self, said: int) -> None:
        """The answer has ended behind `said` tokens: those accepted beyond count as rejected.

        What it was drafted from is let go: a request may be held for a while yet.
        """
        self._history, self._lookups = None, []
        unsaid = self.counts.tokens - said
        assert 0 <= unsaid <= len(self._accepted), (unsaid, len(self._accepted))
        if unsaid:
            self.counts.accepted.subtract(self._accepted[-unsaid:])
            self.counts.tokens -= unsaid
            self.counts.saved -= unsaid

    def _note_plain(self, waiting: int) -> None:
        """Count the rows beyond one of a forward without a draft."""
        self._waiting = 0
        if waiting > 1:
            self.counts.rows += waiting - 1
            self.counts.saved += 1 - self._length.cost(waiting)
            self._length.note(0, waiting)

    # ------------------------------------------------------------ the conversation

    def _tail(self) -> list[int]:
        """Return the last tokens that are known, of which a match is sought.

        Prompt and prediction are indexed as late as here: answers of a batch never draft.
        """
        if not self._sources.looks_up:
            return []
        history = self._history
        if history is None:
            kept = HISTORY_TOKENS_MAX * 3 // 4
            known = [*self._sources.prompt[-kept:], *self.answer][-kept:]
            history = self._history = TokenHistory(known, len(known) + _ANSWER_ROOM)
            if self._prediction:
                # The client's guess is followed as far as the answer has come.
                predicted, self._prediction = TokenHistory(self._prediction), ()
                lookup = TokenLookup("prediction", lambda: predicted, from_start=True)
                for token in self.answer:
                    lookup.take(token)
                self._lookups.insert(1, lookup)  # before other answers, where matches are as long
        return history.tail()

    def _longest(self, tail: list[int]) -> TokenLookup:
        """Return the lookup with the longest match."""
        for lookup in self._lookups:
            lookup.look_up(tail)
        return max(self._lookups, key=lambda lookup: lookup.length)

    # ------------------------------------------------------------ the draft

    def _nodes(self, most: int) -> list[_Node]:
        """Return what may come, the likeliest first, at most `most` nodes."""
        forced = self._sources.forced
        nodes = self._chain([], forced.forced(most), "forced", 0) if forced is not None else []
        if forced is None or (not nodes and self._proposed_kind != "call"):
            # What followed the longest match, and maybe a branch.
            tail = self._tail()
            longest = self._longest(tail)
            nodes = self._chain([], longest.next_tokens(most), longest.source, longest.length)
            if self._allows_trees and nodes and self._proposed_kind != "call":
                nodes = self._with_branch(nodes, tail)[:most]
            return nodes
        is_going_on = True
        while is_going_on and len(nodes) < most:
            nodes, is_going_on = self._with_fitting(nodes, forced, most)
        return nodes

    def _with_fitting(
        self, nodes: list[_Node], forced: ForcedTokens, most: int
    ) -> tuple[list[_Node], bool]:
        """Return nodes, a chain, with those behind that followed a match and may come here.

        Where others must come behind these they are added, and it is said that more may follow.
        """
        ahead = [node.token for node in nodes]
        tokens, length, source = self._behind(ahead, self._tail(), most - len(nodes))
        count, then = forced.fitting(ahead, tokens)
        if not count and (fits := forced.choice(ahead)) is not None:
            # The token that came last, in the same place, of the few that may come now.
            tail = [*self._tail()[-2:], *ahead][-2:]
            few = [(*lookup.fitting_token(tail, fits), lookup.source) for lookup in self._lookups]
            tokens, length, source = max(few, key=itemgetter(1))
            count, then = forced.fitting(ahead, tokens)
        nodes = self._chain(nodes, tokens[:count], source, length)
        is_likely = len(nodes) == len(ahead) + count and (
            not nodes or nodes[-1].chance > _CHANCE_MIN
        )
        if not then or not is_likely:
            return nodes, False
        longer = self._chain(nodes, then[: most - len(nodes)], "forced", 0)
        return longer, longer[-1].chance > _CHANCE_MIN

    def _nodes_of_model(self, others: list[_Node], most: int, waiting: int) -> list[_Node]:
        """Return what the draft model says, where it promises more than what others say.

        It is asked for no more than is worth what it takes; behind what is forced it is not asked.
        """
        model, length = self.model, self._length
        if (
            model is None
            or not self.answer
            or most < 1
            or (others and others[0].source == "forced")
        ):
            return []
        rates, kind, cost = length.rates, self._proposed_kind, model.token_cost
        chances = list(
            itertools.accumulate((rates.rate("model", kind, at) for at in range(most)), mul)
        )
        gain, count = length.gain(chances, waiting, cost)
        other_gain, _ = length.gain([node.chance for node in others], waiting)
        is_probe = not other_gain and length.is_probe_due
        if gain <= other_gain and not (is_probe and (not others or chances[0] > others[0].chance)):
            return []
        place = len(self._sources.prompt) + len(self.answer) - 1
        tokens = model.draft(place, self.answer[-1], max(count, 1))
        self.counts.saved -= len(tokens) * cost
        return self._chain([], tokens, "model", 0)

    def _behind(
        self, forced: list[int], tail: list[int], count: int
    ) -> tuple[list[int], int, DraftSource]:
        """Return what followed the longest match, the match's length and where it comes from."""
        longest = self._longest(tail)
        if not forced:
            return longest.next_tokens(count), longest.length, longest.source
        found = [(*lookup.behind(forced, tail, count), lookup.source) for lookup in self._lookups]
        return max(found, key=itemgetter(1))

    def _chain(
        self,
        nodes: list[_Node],
        tokens: Sequence[int],
        source: DraftSource,
        length: int,
        depth: int | None = None,
    ) -> list[_Node]:
        """Return `nodes`, a chain, with a match's tokens behind: each makes it a token longer.

        With a `depth` they are behind so many of its nodes, should the next one be wrong.
        """
        rates, kind, made = self.rates, self._proposed_kind, list(nodes)
        parent = (len(nodes) if depth is None else depth) - 1
        chance = nodes[parent].chance if parent >= 0 else 1.0
        if depth is not None:
            chance -= nodes[depth].chance
        for at, token in enumerate(tokens):
            chance *= rates.rate(source, kind, length + at)
            made.append(_Node(token, parent, source, length + at, chance))
            parent = len(made) - 1
            if chance < _CHANCE_MIN:
                break
        return made

    def _with_branch(self, nodes: list[_Node], tail: list[int]) -> list[_Node]:
        """Return a chain with what another source, or place, has where it parts from it.

        The nodes are by their chance, each behind its parent.
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
        places = {at: place for place, at in enumerate(order)} | {-1: -1}
        return [best[at]._replace(parent=places[best[at].parent]) for at in order]


class DraftMemory:
    """Earlier answers and learned rates by API key: some 9 MB at most.

    What one owner was answered, and how well it could be drafted, serves that owner alone: how fast
    an answer came would tell another that it was said. Where room for answers is short, the owner
    that holds most forgets the older half of them. So one that holds less than an equal share
    loses nothing by what others are answered. Beside it each answer that is drafted has an index
    of its conversation and prediction, 24 bytes a token: a thousandth of what their KV takes.
    Invariant: `nbytes` is at most the constructor's `bytes_max`. Owner: the inference thread.
    """

    def __init__(self, curve: Mapping[int, float] = CPU_CURVE, bytes_max: int = BYTES_MAX) -> None:
        """`curve` says what forwards of so many rows cost."""
        self.counts = DraftCounts()  # of all answers that have ended
        self._curve = curve
        self._bytes_max = bytes_max
        # Kept for one key: tokens of answers, 8 MB
        self._answers: dict[str, TokenHistory] = {}
        # Kept for one key: how well answers could be drafted
        self._lengths: MemoryByOwner[str, DraftLength] = MemoryByOwner(OWNERS_MAX)

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens that are kept, and of their tables."""
        return sum(history.nbytes for history in self._answers.values())

    def begin(
        self,
        owner: str | None,
        sources: AnswerSources,
        kind: Callable[[], TextKind],
        allows_trees: bool = False,
    ) -> AnswerDrafter:
        """Return the drafter of an answer that begins.

        `sources` are those that the request brings; the memory's own come to them. Where `owner`
        is None, nothing is remembered of the answer, nor anything for it.
        """
        if owner is None:
            return AnswerDrafter(sources, DraftLength(self._curve), kind, allows_trees)
        sources = replace(sources, earlier_answers=lambda: self.answers_of(owner))
        length = self._lengths.get(owner, "") or DraftLength(self._curve)
        self._lengths.put(owner, "", length)
        return AnswerDrafter(sources, length, kind, allows_trees)

    def answers_of(self, owner: str) -> TokenHistory | None:
        """Return the answers of `owner`, the newest last; to be looked up only."""
        return self._answers.get(owner)

    def keep(self, owner: str, answer: Sequence[int]) -> None:
        """Remember an answer for its owner's next ones, unless it is too short to be worth it."""
        if len(answer) < TOKENS_MIN:
            return
        self._answers.setdefault(owner, TokenHistory()).extend([*answer, SEPARATOR])
        while self.nbytes > self._bytes_max:
            largest, history = max(self._answers.items(), key=lambda item: item[1].nbytes)
            newer = TokenHistory(history.newest(len(history) // 2))
            if newer.nbytes < history.nbytes:
                self._answers[largest] = newer
            else:
                del self._answers[largest]

    def clear(self) -> None:
        """Forget all that outlives an answer."""
        self._answers.clear()
        self._lengths.clear()

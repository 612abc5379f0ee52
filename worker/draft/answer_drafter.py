"""Drafts for one answer: what its grammar forces, and what followed the last time.

Tokens alone: nothing here knows a model or an array of one.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from hearth.worker.draft.draft import NO_DRAFT, Draft, DraftSource, chain
from hearth.worker.draft.draft_length import ROWS_MAX, DraftLength, TextKind
from hearth.worker.draft.forced_tokens import ForcedTokens
from hearth.worker.draft.token_history import MATCH_MAX, TokenHistory

_ANSWER_ROOM: Final = 4_096  # tokens of an answer that a history is made for


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


class _Lookup:
    """Follows one text in which the answer's last tokens stood before.

    Where the answer goes on as that text did, the next match is the last one's, a token longer.
    """

    def __init__(self, source: DraftSource, history: TokenHistory, is_own: bool) -> None:
        self.source = source
        self.history = history
        self._is_own = is_own
        self._end: int | None = None
        self._is_looked_up = False
        self.length = 0

    def take(self, token: int) -> None:
        """Follow the answer's next token, before it is part of the own history."""
        if self._end is not None and self.history.token_at(self._end) == token:
            self._end, self.length = self._end + 1, self.length + 1
        else:
            self._end, self.length, self._is_looked_up = None, 0, False

    def look_up(self, tail: Sequence[int]) -> None:
        """Find the best place, unless one is being followed or there is none."""
        if self._is_looked_up:
            return
        match = self.history.find(tail, len(self.history) if self._is_own else None)
        self._is_looked_up = True
        self._end, self.length = (match.end, match.length) if match else (None, 0)

    def followed(self, count: int) -> list[int]:
        """Return what followed there; a text that repeats itself is thought to go on so."""
        if self._end is None:
            return []
        found = self.history.followed(self._end, count)
        if self._is_own and self._end + len(found) == len(self.history):
            period = len(found)
            while len(found) < count:
                found.append(found[-period])
        return found


class AnswerDrafter:
    """Drafts for one answer (`draft.Drafter`). Owner: the inference thread."""

    def __init__(
        self,
        prompt: Sequence[int],
        length: DraftLength,
        kind: Callable[[], TextKind],
        forced: ForcedTokens | None = None,
    ) -> None:
        """`kind` tells what kind of text comes next."""
        self.counts = DraftCounts()
        self._prompt = prompt
        self._answer: list[int] = []
        self._length = length
        self._kind = kind
        self._forced = forced
        self._lookups: list[_Lookup] = []
        self._history: TokenHistory | None = None
        self._proposed: list[tuple[TextKind, int]] = []  # of each node: kind, length of the match

    def take(self, tokens: Sequence[int]) -> None:
        """Take the answer's next tokens."""
        self._answer.extend(tokens)
        self._length.take(len(tokens))
        self.counts.tokens += len(tokens)
        self.counts.rows += len(tokens)
        if self._forced is not None:
            self._forced.take(tokens)
        if self._history is not None:
            for token in tokens:
                for lookup in self._lookups:
                    lookup.take(token)
                self._history.extend((token,))

    def is_promising(self) -> bool:
        """Whether a draft may be had once the next token, which is computed now, is known."""
        kind = self._kind()
        if kind == "call" and self._forced is not None:
            return True
        lookup = self._longest()
        if lookup is None:
            return False
        rate = self._length.rates.rate(lookup.source, kind, lookup.length)
        return self._length.is_worth(rate) or self._length.is_probe_due

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        """Return what may come behind all tokens so far."""
        most = min(tokens_max, ROWS_MAX - waiting)
        if most < 1:
            return NO_DRAFT
        kind, rates = self._kind(), self._length.rates
        tokens: list[int] = self._forced.forced(most) if self._forced is not None else []
        sources: list[DraftSource] = ["forced"] * len(tokens)
        lengths = [0] * len(tokens)
        lookup = self._longest() if not tokens else None
        if lookup is not None:
            more = lookup.followed(most - len(tokens))
            tokens += more
            sources += [lookup.source] * len(more)
            lengths += range(lookup.length, lookup.length + len(more))
        chance, chances = 1.0, []
        for source, length in zip(sources, lengths, strict=True):
            chance *= rates.rate(source, kind, length)
            chances.append(chance)
        count = self._length.count(chances, waiting)
        self._proposed = [(kind, length) for length in lengths[:count]]
        return chain(tokens[:count], sources[:count]) if count else NO_DRAFT

    def note(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        """Learn which of the draft's nodes were right, and the rows of the forward that told so."""
        right = set(accepted)
        self.counts.drafted.update(draft.sources)
        self.counts.accepted.update(draft.sources[node] for node in right)
        self.counts.rows += rows - 1 - len(right)
        self.counts.saved += len(right) + 1 - self._length.cost(rows)
        self._length.note(len(right), len(draft) - len(right))
        for node, source in enumerate(draft.sources):
            kind, length = self._proposed[node]
            self._length.rates.note(source, kind, length, node in right)
            if node not in right:
                break

    def _longest(self) -> _Lookup | None:
        """Return the lookup with the longest match, of those as long the first one."""
        if self._history is None:
            self._begin()
        best: _Lookup | None = None
        for lookup in self._lookups:
            lookup.look_up(self._tail())
            if lookup.length > (best.length if best is not None else 0):
                best = lookup
        return best

    def _begin(self) -> None:
        """Index the prompt: as late as here, since answers of a batch never draft."""
        self._history = TokenHistory(self._prompt, len(self._prompt) + _ANSWER_ROOM)
        self._history.extend(self._answer)
        self._lookups = [_Lookup("history", self._history, is_own=True)]

    def _tail(self) -> list[int]:
        assert self._history is not None
        return self._history.newest(MATCH_MAX).tolist()

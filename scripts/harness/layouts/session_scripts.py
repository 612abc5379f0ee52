"""Renders captured sessions once, as token ids, so that they can be replayed on any layout.

The project's own prompt side renders: sessions, templates, echoed turns, the next prompt that idle
time may read. Requests are built and answered in the order of the capture, so that what overlapped
there overlaps here. Answers are those that were captured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from hearth.commands.replay.ideal_cache import ideal_cached
from hearth.commands.replay.traces import waits_for
from hearth.worker.cache.block_hash import PrefixHash, Tokens, common_length, pack, prefix_hashes
from hearth.worker.cache.continued_line import REWRITTEN_MAX
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from hearth.worker.requests.predict_next_prompt import predict_next_prompt
from hearth.worker.schedule.request_state import Request
from scripts.harness.agent_worker import Desk
from scripts.harness.captured_sessions import Exchange, load
from scripts.harness.model_families import family

FAMILY: Final = "qwen3_5"  # whose template and tokenizer render
FIXTURE: Final = "qwen3"  # the desk has a model, which computes nothing here


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request and its answer. Times are seconds."""

    ids: list[int]
    tokens: Tokens = field(repr=False)  # the same, packed
    answer: list[int] = field(repr=False)  # what the model says, its end-of-turn token included
    waits_for: tuple[int, ...]  # the turns of the session that have ended before it is sent
    gap_s: float  # from the last of their ends
    family: str  # what the session's lines have in common
    asker: str
    is_side: bool
    next_tokens: Tokens | None = field(repr=False)  # of the prompt that idle time may read next

    @property
    def length(self) -> int:
        """Tokens of the prompt and its answer."""
        return len(self.ids) + len(self.answer)

    @property
    def held(self) -> Tokens:
        """What a live cache holds at its end."""
        return np.concatenate([self.tokens, pack(self.answer)])


@dataclass(frozen=True, slots=True, eq=False)
class SessionScript:
    """One captured session, rendered."""

    name: str
    turns: tuple[Turn, ...]
    marks: TurnMarks
    _queries: dict[tuple[str, int, CutRule, PrefixHash], PrefixQuery] = field(
        default_factory=dict, repr=False
    )

    def query(self, number: int, rule: CutRule, root: PrefixHash) -> PrefixQuery:
        """Return a turn's prompt as the cache sees it."""
        turn = self.turns[number]
        key = "prompt", number, rule, root
        if key not in self._queries:
            cuts = rule.cuts(turn.tokens)
            self._queries[key] = _query(turn, turn.tokens, cuts, rule, root, turn.is_side)
        return self._queries[key]

    def next_query(self, number: int, rule: CutRule, root: PrefixHash) -> PrefixQuery | None:
        """Return what idle time may read once a turn has ended."""
        turn = self.turns[number]
        key = "next", number, rule, root
        if turn.next_tokens is not None and key not in self._queries:
            cuts = rule.natural(turn.next_tokens)
            self._queries[key] = _query(turn, turn.next_tokens, cuts, rule, root, is_side=False)
        return self._queries.get(key)


def _query(
    turn: Turn,
    tokens: Tokens,
    cuts: list[int],
    rule: CutRule,
    root: PrefixHash,
    is_side: bool,
) -> PrefixQuery:
    names = prefix_hashes(root, tokens, cuts)
    system_end = rule.system_end(tokens)
    return PrefixQuery(tokens, cuts, names, turn.family, is_side, root=root, system_end=system_end)


def ideals(session: SessionScript, context_tokens: int, is_exact: bool = False) -> list[int]:
    """Return what each turn reads where all prompts and answers before it are kept.

    A prompt that does not fit the context is refused: it reads nothing, and leaves nothing. Exact
    mode keeps no answers: each is read once more.
    """
    kept: list[Any] = []  # arrays of tokens, None where nothing is kept
    for turn in session.turns:
        fits = turn.length <= context_tokens
        kept += [turn.tokens if fits else None, turn.held if fits and not is_exact else None]
    cached = ideal_cached(kept)[::2]
    return [
        0 if known is None else len(turn.ids) - known
        for turn, known in zip(session.turns, cached, strict=True)
    ]


def line_count(session: SessionScript, context_tokens: int) -> int:
    """Return how many conversations a session has: what no later prompt goes on from ends one."""
    turns = [turn for turn in session.turns if turn.length <= context_tokens]
    return sum(
        not any(
            common_length(turn.held, later.tokens) >= turn.length - REWRITTEN_MAX
            for later in turns[number + 1 :]
        )
        for number, turn in enumerate(turns)
    )


def render(path: Path, limit: int = 0) -> SessionScript:
    """Return a trace's first `limit` (0 = all) requests that were answered."""
    with TemporaryDirectory() as directory:
        desk = Desk(FIXTURE, family(FAMILY), Path(directory))
        exchanges = load(path, limit)
        turns = tuple(_Rendering(desk, exchanges).turns())
        desk.sessions.close()
        return SessionScript(exchanges[0].row.trace, turns, desk.marks)


class _Rendering:
    """Builds and ends the requests of one session in the order of the capture."""

    def __init__(self, desk: Desk, exchanges: Sequence[Exchange]) -> None:
        self._desk = desk
        self._exchanges = exchanges
        self._requests: dict[int, Request] = {}
        self._next: dict[int, Tokens | None] = {}

    def turns(self) -> Iterator[Turn]:
        rows = [exchange.row for exchange in self._exchanges]
        begins = [(row.began_s, 1, number) for number, row in enumerate(rows)]
        ends = [(row.ended_s, 0, number) for number, row in enumerate(rows)]
        for _, is_begin, number in sorted(begins + ends):
            if is_begin:
                self._begin(number)
            elif number in self._requests:
                self._end(number)
        waits = waits_for(rows, is_serial=False)
        for number, row in enumerate(rows):
            if number not in self._next:  # it ended when it began
                self._end(number)
            request = self._requests[number]
            last = max((rows[earlier].ended_s for earlier in waits[number]), default=None)
            yield Turn(
                ids=request.ids,
                tokens=request.query.tokens,
                answer=self._answer(number),
                waits_for=tuple(waits[number]),
                gap_s=max(0.0, row.began_s - last) if last is not None else row.began_s,
                family=request.query.family,
                asker=request.asker,
                is_side=request.query.is_side,
                next_tokens=self._next[number],
            )

    def _begin(self, number: int) -> None:
        desk, exchange = self._desk, self._exchanges[number]
        desk.ids.wanted = exchange.ids[:1]
        self._requests[number] = desk.request(desk.named(exchange.prompt))

    def _end(self, number: int) -> None:
        desk, exchange, request = self._desk, self._exchanges[number], self._requests[number]
        desk.ids.wanted = exchange.ids[1:]
        desk.pretend(request, exchange.parts)
        request.end_id = self._end_id(number)
        query = predict_next_prompt(request, desk.prompts, desk.facts)
        self._next[number] = query.tokens if query is not None else None

    def _answer(self, number: int) -> list[int]:
        return [*self._requests[number].sampled, self._end_id(number)]

    def _end_id(self, number: int) -> int:
        each = self._desk.family
        text = each.end_of(self._exchanges[number].parts)
        (end_id,) = each.tokenizer.encode(text, add_special_tokens=False)
        return int(end_id)

"""Renders captured sessions once, as token ids, so that they can be replayed on any layout.

The project's own prompt side renders: sessions, templates, echoed turns, the next prompt that idle
time may read. Requests are built and answered in the order of the capture, so that what overlapped
there overlaps here. Answers are those that were captured.
"""

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from hearth.commands.replay.ideal_cache import ideal_cached
from hearth.commands.replay.traces import waits_for
from hearth.worker.cache.block_hash import Tokens, common_length, pack, prefix_hashes
from hearth.worker.cache.conversation_priority import Conversation
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from hearth.worker.schedule.request_state import Request
from hearth.worker.sessions.session_context import REWRITTEN_MAX
from hearth.worker.threads.request_builder import predict_next_prompt
from scripts.harness.agent_worker import Desk
from scripts.harness.captured_sessions import Exchange, load
from scripts.harness.model_families import family
from scripts.harness.store_builders import ROOT


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request and its answer. Times are seconds."""

    ids: list[int]
    tokens: Tokens = field(repr=False)  # the same, packed
    answer: list[int] = field(repr=False)  # what the model says, its end-of-turn token included
    waits_for: tuple[int, ...]  # the turns of the session that have ended before it is sent
    gap_s: float  # from the last of their ends
    conversation: Conversation
    asker: str
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
    _queries: dict[tuple[int, CutRule, bool], PrefixQuery] = field(default_factory=dict, repr=False)

    def query(self, number: int, rule: CutRule, is_next: bool = False) -> PrefixQuery:
        """Return a turn's prompt as the cache sees it.

        Or the one that `is_next`, which idle time may read once the turn has ended.
        """
        key = number, rule, is_next
        if key not in self._queries:
            turn = self.turns[number]
            tokens = turn.next_tokens if is_next else turn.tokens
            assert tokens is not None, "nobody knows what comes next"
            cuts = rule.natural(tokens) if is_next else rule.cuts(tokens)
            self._queries[key] = PrefixQuery(
                *(tokens, cuts, prefix_hashes(ROOT, tokens, cuts), turn.conversation),
                root=ROOT,
                system_end=rule.system_end(tokens),
            )
        return self._queries[key]


def ideals(session: SessionScript, context_tokens: int, is_exact: bool = False) -> list[int]:
    """Return what each turn reads where all prompts and answers before it are kept.

    A prompt that does not fit the context is refused: it reads nothing, and leaves nothing. Exact
    mode keeps no answers: each is read once more.
    """
    kept: list[Any] = []  # arrays of tokens, None where nothing is kept
    for turn in session.turns:
        fits = turn.length <= context_tokens
        kept += [turn.tokens if fits else None, turn.held if fits and not is_exact else None]
    return [
        0 if known is None else len(turn.ids) - known
        for turn, known in zip(session.turns, ideal_cached(kept)[::2], strict=True)
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
    exchanges = load(path, limit)
    rows = [exchange.row for exchange in exchanges]
    waits = waits_for(rows, is_serial=False)
    requests: dict[int, Request] = {}
    turns: dict[int, Turn] = {}
    moments = [  # an end comes before what begins then, but behind its own begin
        (at_s, is_begin or row.began_s == row.ended_s, not is_begin, number)
        for number, row in enumerate(rows)
        for at_s, is_begin in ((row.began_s, True), (row.ended_s, False))
    ]
    with TemporaryDirectory() as directory:
        # Qwen3.5's template and tokenizer render; the model computes nothing here.
        desk = Desk("qwen3", family("qwen3_5"), Path(directory))
        for _, _, is_end, number in sorted(moments):
            exchange = exchanges[number]
            if not is_end:
                desk.ids.wanted = exchange.ids[:1]
                requests[number] = desk.request(desk.named(exchange.prompt))
            else:
                last_s = max((rows[earlier].ended_s for earlier in waits[number]), default=0.0)
                gap_s = max(0.0, rows[number].began_s - last_s)
                turns[number] = _turn(desk, exchange, requests[number], waits[number], gap_s)
        desk.sessions.close()
    return SessionScript(rows[0].trace, tuple(turns[n] for n in range(len(rows))), desk.marks)


def _turn(desk: Desk, exchange: Exchange, request: Request, waits: list[int], gap_s: float) -> Turn:
    """End a request as captured; return what became of it."""
    desk.ids.wanted = exchange.ids[1:]
    desk.pretend(request, exchange.parts)
    (request.end_id,) = desk.family.tokenizer.encode(
        desk.family.end_of(exchange.parts), add_special_tokens=False
    )
    query = predict_next_prompt(request, desk.prompts)
    return Turn(
        ids=request.ids,
        tokens=request.query.tokens,
        answer=[*request.sampled, request.end_id],
        waits_for=tuple(waits),
        gap_s=gap_s,
        conversation=request.query.conversation,
        asker=request.queue_name,
        next_tokens=query.tokens if query is not None else None,
    )

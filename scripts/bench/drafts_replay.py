"""Replays an answer that is known through a drafter, as the engine would, and counts forwards.

A lone sequence with greedy sampling: a draft's longest right path is accepted and one token more.
The first token comes from the prompt's last forward and costs nothing here.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hearth.worker.draft.draft import NO_DRAFT, Draft, Drafter

# The relative cost of a forward of so many rows: an M4 Pro's 4-bit MLP (mlx issue 3839) and an
# M5 Max's 4-bit 70B model (mlx pull request 3791), both with short contexts.
CURVES: Final = {
    "m4": ((1, 2, 3, 4, 6, 8, 12, 16, 33), (1, 1.10, 1.30, 1.48, 2.05, 2.5, 3.5, 4.0, 4.3)),
    "m5": ((1, 3, 5, 8, 12, 16, 33), (1, 1.11, 1.42, 2.2, 3.16, 3.9, 4.2)),
}
WAITING_MAX: Final = 8  # rows to be fed again: beyond them a forward carries no draft


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """An answer in tokens, each with its kind of text, and the prompt before it."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    kinds: Sequence[str]
    tools: tuple[dict[str, Any], ...] = ()  # that the prompt offers

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.kinds) > 0


@dataclass(slots=True)
class DraftCounts:
    """What was counted of the forwards that wrote text of one kind."""

    tokens: int = 0
    forwards: int = 0
    rows: int = 0
    drafted: Counter[str] = field(default_factory=Counter)  # by source
    accepted: Counter[str] = field(default_factory=Counter)
    costs: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CURVES, 0.0))
    token_us: list[float] = field(default_factory=list)  # the drafter's time, of each forward

    def add(self, other: "DraftCounts") -> None:
        self.tokens += other.tokens
        self.forwards += other.forwards
        self.rows += other.rows
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.costs = {name: cost + other.costs[name] for name, cost in self.costs.items()}
        self.token_us += other.token_us

    def note(self, draft: Draft, path: Sequence[int], rows: int) -> None:
        """Count a forward of so many rows, and the nodes of its draft that were right."""
        self.forwards += 1
        self.rows += rows
        self.drafted.update(draft.sources)
        self.accepted.update(draft.sources[node] for node in path)
        for name in CURVES:
            self.costs[name] += rows_cost(name, rows)

    def note_time(self, used_s: float, tokens: int) -> None:
        """Count the tokens that a forward brought, and the drafter's time for it."""
        self.tokens += tokens
        self.token_us.append(used_s * 1e6 / tokens)


KindCounts = dict[str, DraftCounts]


def rows_cost(curve: str, rows: int) -> float:
    """Return what a forward of so many rows costs, in forwards of one."""
    points, costs = CURVES[curve]
    return float(np.interp(rows, points, costs))


def replay(drafter: Drafter, answer: TokenAnswer, rows_max: int, has_states: bool) -> KindCounts:
    """Return what the forwards of an answer cost, by the kind of the first token of each.

    On a model with recurrent states (`has_states`) a reject leaves the tokens of its forward to be
    fed again at the head of the next one.
    """
    counts: KindCounts = defaultdict(DraftCounts)
    tokens, at, waiting, used_s = answer.tokens, 1, 1, 0.0
    began_s = time.perf_counter()
    drafter.take(tokens[:1])
    used_s += time.perf_counter() - began_s
    may_draft = True
    while at < len(tokens):
        began_s = time.perf_counter()
        room = rows_max - waiting
        draft = NO_DRAFT
        if may_draft and room > 0 and waiting < WAITING_MAX:
            draft = drafter.propose(room, waiting)
        path = accepted_path(draft, tokens[at:])
        rows = waiting + len(draft)
        if draft:
            drafter.note(draft, path, rows)
            may_draft = True  # the next forward waits for this one's tokens in any case
        else:
            may_draft = drafter.is_promising()  # asked while the token is computed
        fresh = tokens[at : at + len(path) + 1]
        drafter.take(fresh)
        used_s += time.perf_counter() - began_s
        counts[answer.kinds[at]].note(draft, path, rows)
        counts[answer.kinds[at]].note_time(used_s, len(fresh))
        waiting = waiting + len(fresh) if has_states and len(path) < len(draft) else 1
        at, used_s = at + len(fresh), 0.0
    return counts


def accepted_path(draft: Draft, truth: Sequence[int]) -> list[int]:
    """Return the nodes of the draft's longest path that is the truth's beginning."""
    path: list[int] = []
    node = -1
    for token in truth:
        found = (
            child
            for child in range(node + 1, len(draft))
            if draft.parents[child] == node and draft.tokens[child] == token
        )
        node = next(found, len(draft))
        if node == len(draft):
            break
        path.append(node)
    return path

"""Ranks lines, which are conversations as the cache sees them, by how likely each goes on.

Which conversation a prompt is of the sessions say, by its number.
"""

from dataclasses import dataclass, field
from typing import Final

from hearth.worker.cache.block_hash import PrefixHash

HALF_LIFE_S = 600.0  # a line unused for this long is half as likely to be needed
CONTINUED = 2.0  # a line that came back once will rather come back again
SPONSORED = 0.4  # one opened while another waited: a sub-agent or a side call of that one
SPONSOR_SILENT_S = 7200.0  # one that has not run for so long waits for nobody
SPONSOR_WAIT_S = 600.0  # how long a waiting line counts as what the new ones work for


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation of a prompt, as the sessions know it. Immutable."""

    number: int = 0  # as people are told of its first line; 0 = nobody asked the sessions
    family: str = ""  # what all lines of one session have in common; "" where it is not known
    is_side: bool = False  # a title, a topic check: not worth a conversation's place


UNKNOWN: Final = Conversation()


@dataclass(eq=False, slots=True)
class LinePriority:
    """One line. `sponsor` is the line that was waiting when this one was opened.

    Invariant: a sponsor has no sponsor. Owner: the inference thread.
    """

    number: int  # its conversation's
    opened_at: float
    used_at: float
    turns: int = 1  # prompts on its path, those of the line that it branched from included
    is_running: bool = False
    sponsor: "LinePriority | None" = field(default=None, repr=False)
    family: str = ""  # of its session; "" where the client names none
    is_side: bool = False  # a title or a topic check of its session
    ended_at: float = 0.0  # when a request of its own last ended
    tip: PrefixHash | None = None  # the last cut of its last prompt ...
    resumed_at: int = 0  # ... which went on behind so many tokens ...
    read_to: int = 0  # ... and has so many

    def likelihood(self, now: float, ttl_s: float) -> float:
        """Return how likely it is needed again, relative to a line just opened (1.0).

        Zero once it has not been used for `ttl_s` (0 = never): it is then the first to go, and
        stays no longer than until there is nothing to compute (`worker/kv/idle_work.py`).
        """
        age_s = 0.0 if self.is_running else max(0.0, now - self.used_at)
        if ttl_s and age_s > ttl_s:
            return 0.0
        factor = CONTINUED if self.turns > 1 else 1.0
        if self.is_side or (self.sponsor is not None and self.sponsor.may_wait(now)):
            factor *= SPONSORED
        recency: float = 0.5 ** (age_s / HALF_LIFE_S)
        return factor * recency

    def may_wait(self, now: float) -> bool:
        """Whether this line may still be waiting for those that opened meanwhile."""
        return self.is_running or now - self.ended_at <= SPONSOR_SILENT_S


class LinePriorities:
    """All lines: opens them, and notes when a request of theirs begins and ends.

    A conversation has one, and more where its requests overlapped, or KV came back for it.
    Owner: the inference thread.
    """

    def __init__(self) -> None:
        self.all: list[LinePriority] = []

    def go_on(self, line: LinePriority, now: float, turns: int) -> None:
        """Note that a request goes on with a line; `turns` are those on the prompt's path."""
        assert not line.is_running, line.number
        line.used_at, line.turns, line.is_running = now, max(turns, line.turns + 1), True

    def open(self, now: float, turns: int, asked: Conversation = UNKNOWN) -> LinePriority:
        """Open a line. The one of its family that waits on it, if any, becomes its sponsor.

        A storm of sub-agents begins when its orchestrator's answer ends, and each of them begins
        while the orchestrator waits; those of a second wave see their siblings, whose sponsor is
        the orchestrator still.
        """
        latest = max(
            (
                line
                for line in self.all
                if line.family == asked.family
                and not line.is_side
                and not (line.sponsor or line).is_running
                and (line.is_running or now - line.used_at <= SPONSOR_WAIT_S)
                and (line.sponsor or line).may_wait(now)
            ),
            key=lambda line: line.used_at,
            default=None,
        )
        sponsor = latest.sponsor or latest if latest is not None else None
        if sponsor is not None:
            assert sponsor.sponsor is None, sponsor.number
            sponsor.used_at = now  # it waits for this one from now on
        line = LinePriority(
            asked.number, now, now, turns, True, sponsor, family=asked.family, is_side=asked.is_side
        )
        self.all.append(line)
        return line

    def end_turn(self, line: LinePriority, now: float) -> None:
        """Note that its request ended."""
        line.used_at, line.ended_at, line.is_running = now, now, False

    def forget(self, kept: set[LinePriority]) -> None:
        """Drop the lines that hold nothing any more."""
        self.all = [line for line in self.all if line.is_running or line in kept]

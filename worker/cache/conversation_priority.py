"""Ranks lines by how likely each continues. A line is a conversation as the cache sees it.

The session store tells the number of the conversation to which a prompt belongs.
"""

from dataclasses import dataclass, field
from typing import Final

from hearth.worker.cache.block_hash import PrefixHash

HALF_LIFE_S = 600.0  # a line unused for this long is half as likely to be needed
CONTINUED = 2.0  # factor for a line that has continued once, and so is likely to do so again
SPONSORED = 0.4  # factor for a line opened while another line waited: a sub-agent or a side call
SPONSOR_SILENT_S = 7200.0  # most time without a request in which a line counts as waiting
SPONSOR_WAIT_S = 600.0  # a line that was used this recently can become the sponsor of a new line


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the session store knows of a prompt's conversation. Immutable."""

    number: int = 0  # number of the first line in reports; 0 = the session store was not asked
    family: str = ""  # id that all lines of one session share; "" = unknown
    is_side: bool = False  # whether this is a title or a topic check, unlikely to continue


UNKNOWN: Final = Conversation()


@dataclass(eq=False, slots=True)
class LinePriority:
    """One line. `sponsor` is the line that was waiting when this line was opened.

    Invariant: a sponsor has no sponsor. Owner: the inference thread.
    """

    number: int  # number of the conversation
    opened_at: float
    used_at: float
    turns: int = 1  # number of prompts on the path, including prompts before the branch point
    is_running: bool = False
    sponsor: "LinePriority | None" = field(default=None, repr=False)
    family: str = ""  # id of the session; "" if the client names no session
    is_side: bool = False  # whether this is a title or a topic check of the session
    ended_at: float = 0.0  # end of the line's last request, without requests of sponsored lines
    tip: PrefixHash | None = None  # last cut of the last prompt
    resumed_at: int = 0  # number of tokens that the last prompt reused
    read_to: int = 0  # number of tokens of the last prompt

    def likelihood(self, now: float, ttl_s: float) -> float:
        """Return how likely the line is needed again, relative to a line just opened (1.0).

        A line that was not used for `ttl_s` (0 = no limit) has likelihood zero. KV of such a line
        is evicted first, or freed the next time the worker is idle (`worker/kv/idle_work.py`).
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
        """Whether this line may still be waiting for lines that opened after it."""
        return self.is_running or now - self.ended_at <= SPONSOR_SILENT_S


class LinePriorities:
    """All lines. Opens lines, and records when requests begin and end.

    A conversation has one line, or several if requests overlapped or KV came from disk.
    Owner: the inference thread.
    """

    def __init__(self) -> None:
        self.all: list[LinePriority] = []

    def begin_request(self, line: LinePriority, now: float, turns: int) -> None:
        """Record that a request continues a line. `turns` counts the prompts on the line's path."""
        assert not line.is_running, line.number
        line.used_at, line.turns, line.is_running = now, max(turns, line.turns + 1), True

    def open(self, now: float, turns: int, conversation: Conversation = UNKNOWN) -> LinePriority:
        """Open a line. A waiting line of the same family becomes its sponsor.

        Sub-agents begin when the orchestrator's answer has ended, while the orchestrator waits. For
        a later sub-agent, the line used last is another sub-agent: the new line then takes over the
        sponsor of that line, the orchestrator.
        """
        latest = max(
            (
                line
                for line in self.all
                if line.family == conversation.family
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
            sponsor.used_at = now  # the sponsor waits for the new line from now on
        line = LinePriority(
            conversation.number,
            now,
            now,
            turns,
            True,
            sponsor,
            family=conversation.family,
            is_side=conversation.is_side,
        )
        self.all.append(line)
        return line

    def end_request(self, line: LinePriority, now: float) -> None:
        """Record that the line's request has ended."""
        line.used_at, line.ended_at, line.is_running = now, now, False

    def forget(self, kept: set[LinePriority]) -> None:
        """Drop lines that neither run nor have KV in the store. `kept` are the lines with KV."""
        self.all = [line for line in self.all if line.is_running or line in kept]

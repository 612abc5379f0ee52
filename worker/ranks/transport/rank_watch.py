"""Decides from what each follower says, and from its silence, whether a rank is lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hearth.shared.zmq_transport import SILENCE_S_MAX

BEAT_S: Final = 0.5  # each follower says how far it is
WAIT_BEATS: Final = 2  # in which a follower waits while rank 0 computes, before that is wrong


@dataclass(frozen=True, slots=True)
class RankBeat:
    """What a follower says of itself each BEAT_S."""

    done_count: int  # operations; -1 until it is ready for the first one
    is_waiting: bool  # for the next operation
    said_count: int  # facts that it has witnessed


@dataclass(slots=True)
class _RankState:
    heard_at: float
    moved_at: float
    beat: RankBeat = RankBeat(-1, False, 0)
    told_count: int = 0  # operations, when it was last found waiting
    waits: int = 0  # beats in a row in which it waited while rank 0 computed


class RankWatch:
    """Knows when each follower was last heard, and when it last got further. Owner: one thread."""

    def __init__(self, hosts: Sequence[str], stall_s: float, now_s: float) -> None:
        """`hosts` names the machine of each rank; `stall_s` is STALL_SECONDS, 0 = never."""
        self._hosts = hosts
        self._stall_s = stall_s
        self.silence_s_max = min(SILENCE_S_MAX, stall_s) if stall_s else SILENCE_S_MAX
        self._ranks = {rank: _RankState(now_s, now_s) for rank in range(1, len(hosts))}

    def name(self, rank: int) -> str:
        """Return how `rank` is named to people, as in "rank 1 of 2 (192.168.2.2)"."""
        return f"rank {rank} of {len(self._hosts)} ({self._hosts[rank]})"

    def note_heard(self, rank: int, now_s: float) -> None:
        self._ranks[rank].heard_at = now_s

    def note_beat(
        self, rank: int, beat: RankBeat, told_count: int, own_count: int, now_s: float
    ) -> str | None:
        """Take in a beat; return what is wrong, if anything is.

        `told_count` operations were told by now, and rank 0 has witnessed `own_count` facts: both
        were read after the beat came.
        """
        state = self._ranks[rank]
        before, state.beat, state.heard_at = state.beat, beat, now_s
        if beat != before or beat.done_count == told_count:
            state.moved_at = now_s
        is_left = beat.is_waiting and beat.done_count == told_count and beat.said_count < own_count
        state.waits = state.waits + 1 if is_left and told_count == state.told_count else 0
        state.told_count = told_count
        if state.waits < WAIT_BEATS:
            return None
        return (
            f"{self.name(rank)} has done all {told_count:,} operations that it was told and waits, "
            f"while rank 0 is in step {own_count:,} and it in {beat.said_count:,}: "
            "an operation was not told"
        )

    def check(self, now_s: float) -> str | None:
        """Return what is wrong by now, if anything is."""
        for rank, state in self._ranks.items():
            silent_s, stuck_s = now_s - state.heard_at, now_s - state.moved_at
            if silent_s >= self.silence_s_max:
                return f"{self.name(rank)} is silent for {silent_s:.0f} s"
            # The first operation loads the model, which may take minutes.
            if state.beat.done_count > 0 and self._stall_s and stuck_s >= self._stall_s:
                text = f"is in operation {state.beat.done_count + 1:,} for {stuck_s:.0f} s"
                return f"{self.name(rank)} {text} (STALL_SECONDS)"
        return None

    def stood_still(self, now_s: float) -> None:
        """Note that this process did not run: what it did not hear proves nothing."""
        for state in self._ranks.values():
            state.heard_at, state.moved_at = now_s, now_s

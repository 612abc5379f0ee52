"""Divides what a model leaves of its worker's memory between running requests and kept KV.

Numbers only: nothing here knows of settings, machines or arrays.
"""

from dataclasses import dataclass
from typing import Final

from hearth.worker.engine.memory_reserve import working_bytes

LIVE_SHARE_MIN: Final = 4  # requests have 1 / 4 of the room at least, so that several run at once
LIVE_SHARE_MAX: Final = 2  # and 1 / 2 at most; beyond that kept KV gives way when they need it
IDLE_SHARE: Final = 2  # of that, 1 / 2 may stay with live caches that no request uses


@dataclass(frozen=True, slots=True)
class KVRoom:
    """The parts of the room. What they leave of it is free for requests that begin."""

    kept_bytes: int  # kept KV may take
    idle_bytes: int  # live caches that no request uses may take


def divide_room(
    limit: int, model_bytes: int, slot_bytes: int, forward_bytes: int, overhead: float = 0.0
) -> KVRoom:
    """Return the default parts of kept KV and of idle live caches, in bytes of arrays.

    `limit` is what the worker may take, `model_bytes` what it takes without any KV, `slot_bytes`
    the KV of one sequence as long as the told context, `forward_bytes` what a forward at that
    depth takes, and `overhead` what the system counts for a byte of arrays beyond it.

    Requests have what one sequence of the told context takes, within their bounds: beside kept KV
    that is full, it is read and nothing is evicted for it. Where it takes more than half of the
    room, as it does where memory decides how long the context is, kept KV gives way to it.
    """
    assert min(limit, model_bytes, slot_bytes, forward_bytes) >= 0 and overhead >= 0
    room = int(max(0, limit - model_bytes - working_bytes(limit)) / (1 + overhead))
    wanted = slot_bytes + int(forward_bytes / (1 + overhead))
    live = min(max(wanted, room // LIVE_SHARE_MIN), room // LIVE_SHARE_MAX)
    return KVRoom(room - live, live // IDLE_SHARE)

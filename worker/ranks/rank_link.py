"""Defines how rank 0 of a model tells the other ranks what to compute, and how they answer.

Rank 0, the leader, decides. A follower does each operation in the order in which it was told, and
decides nothing. Tensors take another way: the collectives inside the model. What carries the
operations, unchanged and in order, is in `leader_link` and `follower_link`;
`scripts/harness/ranks/` has a pair without processes for tests.

Rules that both sides hold to:
  told first  the leader tells an operation before it witnesses what that computes
  alike       between two operations both sides witness the same facts in the same order
  one answer  a follower answers each operation that was asked, and no other, before the next
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import msgpack

from hearth.shared.errors import WireError

Value = None | bool | int | float | str | bytes | list[Any] | dict[Any, Any]  # what msgpack carries
Handle = NewType("Handle", int)  # the number by which all ranks know a cache, rows or states
OnEvent = Callable[[int, str, list[Value]], None]  # (rank, name, arguments); on the link's thread


@dataclass(frozen=True, slots=True)
class Operation:
    """What a follower is told to do, a list of these fields. A tuple comes as a list."""

    name: str
    arguments: list[Any]
    drops: list[int]  # handles that rank 0 has let go of; they go before the operation is done
    is_asked: bool  # rank 0 waits for an answer


@dataclass(frozen=True, slots=True)
class RankRoom:
    """What a follower's last heartbeat said of its memory."""

    limit_bytes: int
    used_bytes: int


class RankMismatch(Exception):
    """A follower did something else than rank 0. Its text says what differed."""


class RankLost(Exception):
    """A rank is gone, silent or stuck. Its text names the rank, its host and the remedy."""


def pack(value: Value | Sequence[Value]) -> bytes:
    """Return `value` as bytes. Raises: WireError, where it is nothing that can be told."""
    try:
        return bytes(msgpack.packb(value, use_bin_type=True))
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"cannot be told to another rank: {error}") from None


def unpack(frame: bytes) -> Any:
    """Return what `pack` was given, tuples as lists. Raises: WireError."""
    try:
        return msgpack.unpackb(frame, raw=False, strict_map_key=False)
    except Exception as error:  # msgpack raises half a dozen kinds, and ValueError
        raise WireError(f"bad frame of {len(frame)} bytes: {error}") from None

"""Defines the messages by which rank 0 of a model controls the other ranks, and their answers.

Rank 0, the leader, decides. A follower does the operations in the order in which they were sent,
and decides nothing. Tensors travel separately, in the collectives inside the model. `leader_link`
and `follower_link` carry the operations, unchanged and in order; `scripts/harness/ranks/` has links
without processes for tests.

Rules for both sides:
  send first  the leader sends an operation before it witnesses the operation's facts
  equal       between two operations both sides witness the same facts in the same order
  one answer  a follower answers a request before the next operation, and answers nothing else

All other messages are lists that begin with their kind. A follower sends HELLO and gets WELCOME or
REFUSED. Then it sends HERE on a second connection. That connection carries only operations and
their answers, so that its thread needs no lock. From then on the follower sends BEAT, WITNESS and
EVENT, and FAILED before it ends.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, Literal, NewType

import msgpack

from hearth.shared.errors import WireError
from hearth.shared.version import VERSION

Value = None | bool | int | float | str | bytes | list[Any] | dict[Any, Any]  # msgpack
Handle = NewType("Handle", int)  # number of a cache, rows or states on all ranks
OnEvent = Callable[[int, str, list[Value]], None]  # (rank, name, arguments); on the link's thread


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation for a follower, sent as a list of these fields. Tuples arrive as lists."""

    name: str
    arguments: list[Any]
    drops: list[int]  # handles that rank 0 released; dropped before the operation
    is_asked: bool  # whether rank 0 waits for an answer


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory in a follower's last heartbeat."""

    limit_bytes: int
    used_bytes: int


class RankMismatch(Exception):
    """A follower computed something else than rank 0. The text names the difference."""


class RankLost(Exception):
    """A rank is gone, silent or stuck. The text names the rank, its host and the remedy."""


def pack(value: Value | Sequence[Value]) -> bytes:
    """Return `value` as bytes. Raises: WireError: msgpack cannot encode it."""
    try:
        return bytes(msgpack.packb(value, use_bin_type=True))
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"cannot be told to another rank: {error}") from None


def unpack(frame: bytes) -> Any:
    """Return the value that was packed, with tuples as lists. Raises: WireError."""
    try:
        return msgpack.unpackb(frame, raw=False, strict_map_key=False)
    except Exception as error:  # msgpack raises many types of exceptions
        raise WireError(f"bad frame of {len(frame)} bytes: {error}") from None


STOP: Final = "stop"  # the operation that ends a follower
RETURNED: Final = "returned"  # the result for which a follower waits inside an operation

# Kinds of messages, each with its further items:
HELLO: Final = "hello"  # rank, or None if the address identifies it; versions
WELCOME: Final = "welcome"  # fields of RankWelcome
REFUSED: Final = "refused"  # reason
HERE: Final = "here"  # rank; secret of the welcome
BEAT: Final = "beat"  # done count, is waiting, witnessed count; limit and used bytes
WITNESS: Final = "witness"  # packed facts
EVENT: Final = "event"  # name, arguments
FAILED: Final = "failed"  # whether a restart may help; reason

Purpose = Literal["serve", "check"]  # serve a model, or compare the ranks


@dataclass(frozen=True, slots=True)
class RankWelcome:
    """The content of rank 0's WELCOME to a follower."""

    rank: int
    secret: bytes  # proof of identity on the second connection
    operations: str  # endpoint of the second connection
    hosts: list[str]
    tensors: dict[str, Any]  # transport of tensors; see `rank_hosts.plan_tensors`
    settings: dict[str, Any]  # rank 0's SHARED_SETTINGS, by field
    purpose: Purpose


def read_message(frame: bytes) -> list[Any]:
    """Return the message in `frame`. Raises: WireError."""
    items = unpack(frame)
    if not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise WireError("no message of ranks")
    return items


def own_versions() -> dict[str, str]:
    """Return the versions that all ranks must share, since other code computes other bits."""
    return {
        "hearth": VERSION,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def difference(own: Mapping[str, Any], other: Any) -> str | None:
    """Return the first difference between rank 0's facts and another rank's, or None."""
    if not isinstance(other, dict):
        return f"it says {other!r:.80} of itself"
    for name in dict.fromkeys([*own, *other]):
        if own.get(name) != other.get(name):
            return f"its {name} is {other.get(name)}, and rank 0's is {own.get(name)}"
    return None

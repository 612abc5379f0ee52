"""Defines how rank 0 of a model tells the other ranks what to compute, and how they answer.

Rank 0, the leader, decides. A follower does each operation in the order in which it was told, and
decides nothing. Tensors take another way: the collectives inside the model. What carries the
operations, unchanged and in order, is in `leader_link` and `follower_link`;
`scripts/harness/ranks/` has a pair without processes for tests.

Rules that both sides hold to:
  told first  the leader tells an operation before it witnesses what that computes
  alike       between two operations both sides witness the same facts in the same order
  one answer  a follower answers each operation that was asked, and no other, before the next

Beside operations a message is a list, whose first item is its kind. A follower says HELLO and gets
WELCOME or REFUSED. Then it says HERE on its second connection, which has the operations and their
answers alone, so that a thread of its own can send them without a lock. From then on it sends BEAT,
WITNESS and EVENT as it goes, and FAILED before it ends itself.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, Literal, NewType

import msgpack

from hearth.shared.errors import WireError
from hearth.shared.version import VERSION

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


STOP: Final = "stop"  # the operation that ends a follower
RETURNED: Final = "returned"  # that answers what a follower waits for amid another

HELLO: Final = "hello"  # its rank, or None where its address says it; what it is made of
WELCOME: Final = "welcome"  # see RankWelcome
REFUSED: Final = "refused"  # why
HERE: Final = "here"  # its rank; the secret of the welcome
BEAT: Final = "beat"  # done, is waiting, said; limit and used bytes
WITNESS: Final = "witness"  # packed facts
EVENT: Final = "event"  # name, arguments
FAILED: Final = "failed"  # whether a restart may help; why

Purpose = Literal["serve", "check"]  # what the ranks are for


@dataclass(frozen=True, slots=True)
class RankWelcome:
    """What a follower is told once rank 0 knows it."""

    rank: int
    secret: bytes  # that it names on its second connection
    operations: str  # the endpoint of that
    hosts: list[str]
    tensors: dict[str, Any]  # how tensors travel; see rank_backends
    settings: dict[str, Any]  # those of rank 0 that decide what is computed, by field
    purpose: Purpose


def message(frame: bytes) -> list[Any]:
    """Return the message in `frame`. Raises: WireError."""
    items = unpack(frame)
    if not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise WireError("no message of ranks")
    return items


def own_versions() -> dict[str, str]:
    """Return what every rank must have the same of: other code computes other bits, or other KV."""
    return {
        "hearth": VERSION,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def difference(own: Mapping[str, Any], theirs: Any) -> str | None:
    """Return what differs between rank 0 and another rank, with both values; None where nothing."""
    if not isinstance(theirs, dict):
        return f"it says {theirs!r:.80} of itself"
    for name in dict.fromkeys([*own, *theirs]):
        if own.get(name) != theirs.get(name):
            return f"its {name} is {theirs.get(name)}, and rank 0's is {own.get(name)}"
    return None

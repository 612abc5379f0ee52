"""Defines how rank 0 of a model tells the other ranks what to compute, and how they answer.

Rank 0, the leader, decides. A follower does each operation in the order in which it was told, and
decides nothing. Tensors take another way: the collectives inside the model. What carries the
operations is in `leader_link` and `follower_link`; `scripts/harness/ranks/` has a
pair without processes for tests.

Rules that both sides hold to:
  told first  the leader tells an operation before it witnesses what that computes
  alike       between two operations both sides witness the same facts in the same order
  one answer  a follower answers each operation that was asked, and no other, before the next
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NewType, Protocol

import msgpack

from hearth.shared.errors import WireError

Value = None | bool | int | float | str | bytes | list[Any] | dict[Any, Any]  # what msgpack carries
Handle = NewType("Handle", int)  # the number by which all ranks know a cache, rows or states
OnEvent = Callable[[int, str, list[Value]], None]  # (rank, name, arguments); on the link's thread

DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Operation:
    """What a follower is told to do. A tuple that was told comes as a list."""

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
    """A follower did, or was told, something else than rank 0. Its text says what differed."""


class RankLost(Exception):
    """A rank is gone, silent or stuck. Its text names the rank, its host and the remedy."""


class LeaderLink(Protocol):
    """Rank 0's end. `tell`, `ask` and `witness`: inference thread only.

    A failure of a rank ends the process from within, on the link's thread, so that nobody here
    has to ask for one; the in-memory pair raises instead.
    """

    size: int  # ranks, this one counted
    on_event: OnEvent  # set it before the first operation that causes events

    @property
    def hosts(self) -> Sequence[str]:
        """The machine of each rank, as a message to people names it."""

    @property
    def rooms(self) -> Mapping[int, RankRoom]:
        """What followers have said of their memory; of no bytes before they looked."""

    def tell(self, name: str, *arguments: Value, drops: Sequence[int] = ()) -> None:
        """Have all followers do `name`, after what they were told before. Never waits."""

    def ask(self, name: str, *arguments: Value, drops: Sequence[int] = ()) -> list[Any]:
        """Have all followers do `name`; return what ranks 1 to size - 1 answer, once all have."""

    def witness(self, *facts: Value) -> None:
        """Note what is about to be computed, or was; every follower must note the same next."""

    def wait_for_failure(self) -> None:
        """Give the link time to end the process, where a collective failed for a lost rank."""


class FollowerLink(Protocol):
    """The end of one of ranks 1 to size - 1. Owner: its main thread, but for `send_event`."""

    rank: int
    size: int

    def next(self) -> Operation:
        """Wait for the next operation.

        Raises:
            RankMismatch: it is not the one that follows the one before, or was changed on its way.
        """

    def answer(self, value: Value) -> None:
        """Answer the operation that was asked."""

    def witness(self, *facts: Value) -> None:
        """Note what is about to be computed, or was; the leader compares it with its own."""

    def send_event(self, name: str, *arguments: Value) -> None:
        """Tell the leader something that it did not ask for. Any thread; never waits."""

    def set_room(self, limit_bytes: int, used_bytes: int) -> None:
        """Have the next heartbeats tell the leader this. Any thread."""


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


class OperationFrames:
    """Writes operations as frames, or reads them; each with its number and a digest of all so far.

    Each end has one of its own. Owner: the thread that tells, or that takes.
    """

    def __init__(self) -> None:
        self.count = 0  # operations written or read
        self._digest = bytes(DIGEST_BYTES)

    def write(
        self, name: str, arguments: Sequence[Value], drops: Sequence[int], *, is_asked: bool
    ) -> bytes:
        """Return the frame of the next operation. Raises: WireError, where it cannot be told."""
        body = pack([name, arguments, drops, is_asked])
        return self._advance(body) + self.count.to_bytes(8) + body

    def read(self, frame: bytes) -> Operation:
        """Return the operation in `frame`. Raises: RankMismatch, where it is not the next one."""
        digest, number, body = frame[:DIGEST_BYTES], frame[DIGEST_BYTES:16], frame[16:]
        came, expected = int.from_bytes(number), self.count + 1
        if came != expected:
            raise RankMismatch(f"operation {came} came where operation {expected} was due")
        if self._advance(body) != digest:
            raise RankMismatch(f"operation {came} or one before it is not the one that was told")
        name, arguments, drops, is_asked = unpack(body)
        return Operation(name, arguments, drops, is_asked)

    def _advance(self, body: bytes) -> bytes:
        self.count += 1
        self._digest = blake2b(self._digest + body, digest_size=DIGEST_BYTES).digest()
        return self._digest

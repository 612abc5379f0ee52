"""Receives rank 0's operations at a follower, and reports the follower's progress."""

import threading
from collections.abc import Callable
from typing import Any, Final

from hearth.shared.errors import EXIT_CANNOT_START, EXIT_RANK_LOST, StartError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.zmq_rank_port import RankContext, RankDealer, RankGone
from hearth.shared.zmq_transport import SILENCE_S_MAX
from hearth.worker.ranks.leader_link import BEAT_S
from hearth.worker.ranks.rank_link import (
    BEAT,
    EVENT,
    FAILED,
    HELLO,
    HERE,
    REFUSED,
    WELCOME,
    WITNESS,
    Operation,
    RankLost,
    RankWelcome,
    Value,
    own_versions,
    pack,
    read_message,
    unpack,
)

STOOD_STILL_S: Final = 4 * BEAT_S  # a longer gap between beats means that this process did not run
LEAVE_WAIT_S: Final = 0.5  # time for rank 0 to read the last message

End = Callable[[int, str], None]  # (exit code, why); ends the process


class FollowerLink:
    """Connects one follower to rank 0. Owner: the main thread.

    The link's own thread reports this rank's progress each BEAT_S, and ends the process when rank 0
    is gone: the main thread may hang in a collective by then.
    """

    def __init__(self, context: RankContext, endpoint: str, address: str, end: End) -> None:
        """Connect to `endpoint`, from `address` unless that is "". Raises: StartError."""
        self.rank, self.size = 0, 0
        self._context, self._address, self._end = context, address, end
        self._status = RankDealer(context, endpoint, address)
        self._operations: RankDealer | None = None
        self._received_count = 0  # operations received
        self._done_count = -1  # finished operations; -1 until this rank waits for the first one
        self._witnessed_count = 0
        self._is_waiting = False
        self._memory = (0, 0)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank 0", daemon=True)

    def join(self, rank: int | None) -> RankWelcome:
        """Send HELLO and wait for WELCOME; `rank` is None if the address identifies this rank.

        Raises:
            StartError: rank 0 refuses this rank.
            RankLost: rank 0 is gone, or does not trust this rank's key.
        """
        self._status.send(pack([HELLO, rank, own_versions()]))
        while (frame := self._status.receive(BEAT_S)) is None:
            if self._status.wait_for_end(0):
                raise RankLost("rank 0 ended the connection: it restarts, or has other keys")
        kind, *items = read_message(frame)
        if kind == REFUSED:
            raise StartError(f"Rank 0 refuses this one: {items[0]}")
        assert kind == WELCOME, kind
        welcome = RankWelcome(**items[0])
        self.rank, self.size = welcome.rank, len(welcome.hosts)
        self._operations = RankDealer(self._context, welcome.operations, self._address)
        self._operations.send(pack([HERE, welcome.rank, welcome.secret]))
        self._thread.start()
        return welcome

    # ------------------------------------------------------------ the main thread

    def next(self) -> Operation:
        """Wait for the next operation."""
        assert self._operations is not None
        self._done_count = self._received_count
        self._is_waiting = True
        frame = self._operations.receive(None)
        self._is_waiting = False
        assert frame is not None
        self._received_count += 1
        return Operation(*unpack(frame))

    def answer(self, value: Value) -> None:
        """Send the answer to the last operation, if rank 0 asked for one."""
        assert self._operations is not None
        self._operations.send(pack(value))

    def witness(self, *facts: Value) -> None:
        """Send a fact about the computation; the leader compares it with its own."""
        self._send([WITNESS, pack(facts)])
        self._witnessed_count += 1

    # ------------------------------------------------------------ any thread

    def send_event(self, name: str, *arguments: Value) -> None:
        """Send the leader an event that it did not request. Never waits."""
        self._send([EVENT, name, list(arguments)])

    def set_memory(self, limit_bytes: int, used_bytes: int) -> None:
        """Set the memory that the next heartbeats report."""
        self._memory = (limit_bytes, used_bytes)

    def fail(self, error: Exception) -> None:
        """Report to rank 0 why this rank ends, which ends all ranks; then end the process."""
        cannot_start = isinstance(error, StartError)
        broke = f"it broke ({type(error).__name__}); its log says how"
        why = str(error) if cannot_start else broke
        self._send([FAILED, not cannot_start, why])
        self._is_closed.wait(LEAVE_WAIT_S)
        self._end(EXIT_CANNOT_START if cannot_start else EXIT_RANK_LOST, why)

    def _send(self, items: list[Any]) -> None:
        try:
            self._status.send(pack(items))
        except RankGone as error:
            self._end(EXIT_RANK_LOST, str(error))

    # ------------------------------------------------------------ the link's thread

    def _run(self) -> None:
        heard_at = beat_at = awake_s()
        while not self._is_closed.is_set():
            limit, used = self._memory
            # `_is_waiting` is read before the counts, which do not change while it is true.
            is_waiting = self._is_waiting
            self._send([BEAT, self._done_count, is_waiting, self._witnessed_count, limit, used])
            if self._status.wait_for_end(BEAT_S):
                self._end(EXIT_RANK_LOST, "rank 0 is gone")
                return
            now_s = awake_s()
            if now_s - beat_at > STOOD_STILL_S:
                heard_at = now_s
            while self._status.take_waiting() is not None:  # a sign of life
                heard_at = now_s
            beat_at = now_s
            if now_s - heard_at > SILENCE_S_MAX:
                self._end(EXIT_RANK_LOST, f"rank 0 is silent for {now_s - heard_at:.0f} s")
                return

    def close(self) -> None:
        """Close the link; rank 0 notices that this rank is gone. Main thread."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._status.close()
        if self._operations is not None:
            self._operations.close()
        self._context.close()

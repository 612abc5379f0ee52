"""Sends operations from rank 0 to the followers, compares their facts and watches their health."""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.errors import EXIT_CANNOT_START, EXIT_RANK_LOST, WireError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.zmq_rank_port import RankContext, RankGone, RankRouter
from hearth.shared.zmq_transport import SILENCE_S_MAX
from hearth.worker.ranks.rank_hosts import RankHost, are_local
from hearth.worker.ranks.rank_link import (
    BEAT,
    EVENT,
    FAILED,
    HELLO,
    HERE,
    REFUSED,
    WELCOME,
    WITNESS,
    OnEvent,
    RankLost,
    RankMemory,
    RankMismatch,
    Value,
    difference,
    own_versions,
    pack,
    read_message,
    unpack,
)

BEAT_S: Final = 0.5  # between two heartbeats of a follower
WAIT_BEATS: Final = 2  # beats in which a follower may wait while rank 0 computes


@dataclass(frozen=True, slots=True)
class RankBeat:
    """The progress that a follower reports each BEAT_S."""

    done_count: int  # finished operations; -1 until it is ready for the first one
    is_waiting: bool  # whether it waits for the next operation
    witnessed_count: int  # facts that it has sent


@dataclass(slots=True)
class _RankState:
    heard_at: float
    moved_at: float
    beat: RankBeat = RankBeat(-1, False, 0)
    sent_count: int = 0  # operations sent at the last beat
    waits: int = 0  # consecutive beats in which it waited while rank 0 computed


class RankWatch:
    """Tracks when each follower was last heard and last made progress. Owner: one thread."""

    def __init__(self, hosts: Sequence[str], stall_s: float, now_s: float) -> None:
        """`hosts` names the machine of each rank; `stall_s` is STALL_SECONDS, 0 = no limit."""
        self._hosts = hosts
        self._stall_s = stall_s
        self.silence_s_max = min(SILENCE_S_MAX, stall_s) if stall_s else SILENCE_S_MAX
        self._ranks = {rank: _RankState(now_s, now_s) for rank in range(1, len(hosts))}

    def name(self, rank: int) -> str:
        """Return the name of `rank` for people, such as "rank 1 of 2 (192.168.2.2)"."""
        return f"rank {rank} of {len(self._hosts)} ({self._hosts[rank]})"

    def record_heard(self, rank: int, now_s: float) -> None:
        self._ranks[rank].heard_at = now_s

    def record_beat(
        self, rank: int, beat: RankBeat, sent_count: int, own_count: int, now_s: float
    ) -> str | None:
        """Record a heartbeat; return an error text if it shows a fault.

        `sent_count` operations were sent by now, and rank 0 has witnessed `own_count` facts. Both
        counts are read after the beat arrived.
        """
        state = self._ranks[rank]
        before, state.beat, state.heard_at = state.beat, beat, now_s
        if beat != before or beat.done_count == sent_count:
            state.moved_at = now_s
        is_stranded = (
            beat.is_waiting and beat.done_count == sent_count and beat.witnessed_count < own_count
        )
        state.waits = state.waits + 1 if is_stranded and sent_count == state.sent_count else 0
        state.sent_count = sent_count
        if state.waits < WAIT_BEATS:
            return None
        return (
            f"{self.name(rank)} has done all {sent_count:,} operations that it was told and waits, "
            f"while rank 0 is in step {own_count:,} and it in {beat.witnessed_count:,}: "
            "an operation was not told"
        )

    def check(self, now_s: float) -> str | None:
        """Return an error text if a follower is silent or stuck."""
        for rank, state in self._ranks.items():
            silent_s, stuck_s = now_s - state.heard_at, now_s - state.moved_at
            if silent_s >= self.silence_s_max:
                return f"{self.name(rank)} is silent for {silent_s:.0f} s"
            # The first operation loads the model, which may take minutes.
            if state.beat.done_count > 0 and self._stall_s and stuck_s >= self._stall_s:
                text = f"is in operation {state.beat.done_count + 1:,} for {stuck_s:.0f} s"
                return f"{self.name(rank)} {text} (STALL_SECONDS)"
        return None

    def restart_timers(self, now_s: float) -> None:
        """Restart all timers because this process did not run: missing beats prove nothing."""
        for state in self._ranks.values():
            state.heard_at, state.moved_at = now_s, now_s


FACTS_AHEAD_MAX: Final = 100_000  # facts by which one side may be ahead of the other
SHOWN_CHARS_MAX: Final = 200


class WitnessComparison:
    """Compares the facts of rank 0 with those of every follower.

    Owner: the link's thread; the inference thread calls `record_own` and never waits.
    Invariant: `_own[0]` is the fact at `_first`, the lowest count of facts from a follower.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.own_count = 0
        # Kept for nobody: up to 100,000 steps with sampled ids
        self._own: deque[bytes] = deque()
        self._first = 0
        self.counts = dict.fromkeys(ranks, 0)  # equal facts of each follower
        # Kept for nobody: facts of followers that are ahead of rank 0
        self._ahead: dict[int, deque[bytes]] = {rank: deque() for rank in self.counts}

    def record_own(self, facts: bytes) -> None:
        self._own.append(facts)
        self.own_count += 1

    def record(self, rank: int, facts: bytes) -> None:
        """Record the next fact of `rank`, and compare it. Raises: RankMismatch."""
        self._ahead[rank].append(facts)
        self.compare(rank)

    def compare(self, rank: int) -> None:
        """Compare the facts that both sides have by now. Raises: RankMismatch."""
        ahead = self._ahead[rank]
        while ahead and self.counts[rank] < self.own_count:
            ordinal = self.counts[rank]
            own, other = self._own[ordinal - self._first], ahead.popleft()
            if own != other:
                raise RankMismatch(
                    f"step {ordinal + 1}: rank 0 computes {_shown(own)}, "
                    f"rank {rank} {_shown(other)}"
                )
            self.counts[rank] += 1
        while self._first < min(self.counts.values()):  # every follower has this fact
            self._own.popleft()
            self._first += 1
        if max(len(ahead), len(self._own)) > FACTS_AHEAD_MAX:
            raise RankMismatch(f"rank {rank} is over {FACTS_AHEAD_MAX:,} steps away from rank 0")

    def witnessed_count(self, rank: int) -> int:
        """Return how many facts `rank` has sent, compared or not."""
        return self.counts[rank] + len(self._ahead[rank])


def _shown(facts: bytes) -> str:
    text = repr(unpack(facts))
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "..."


log = logging.getLogger(__name__)

TICK_S: Final = 0.25
LAST_WORDS_S: Final = 1.0  # time for reading the last messages of a lost rank
STOOD_STILL_S: Final = 2.0  # a longer gap between ticks: this process itself did not run
CHECK_S: Final = 0.5  # between two checks for the end of the process
FAILURE_WAIT_S: Final = 2.0  # time for finding the lost rank after a collective failed

End = Callable[[int, str], None]  # (exit code, why); ends the process


class LeaderLink:
    """Connects rank 0 to its followers. `send`, `request` and `witness`: inference thread only.

    The link's own thread receives the followers' messages, sends them a sign of life each TICK_S
    (which fails if a follower is gone), and ends the process once a rank is lost: the inference
    thread may hang in a collective by then.
    Invariant: `end` is called at most once, with the first reason.
    """

    def __init__(
        self,
        hosts: Sequence[RankHost],
        stall_s: float,
        welcome_fields: Mapping[str, Any],
        context: RankContext,
        endpoints: tuple[str, str],
        end: End,
    ) -> None:
        """Bind both endpoints, for status and for operations. Raises: StartError.

        `welcome_fields` are the fields of RankWelcome that this link does not set itself.
        """
        self.hosts = [host.name for host in hosts]
        self.size = len(self.hosts)  # number of ranks, including rank 0
        # Set before the first operation that causes events:
        self.on_event: OnEvent = lambda rank, name, arguments: None
        self.how_ended: Callable[[int], str] = lambda rank: ""  # waits for a process to end
        self.rank_memory: dict[int, RankMemory] = {}  # 0 bytes until a follower has measured
        self.failure = ""
        self._welcome_fields, self._context, self._end = welcome_fields, context, end
        self._status = RankRouter(context, endpoints[0])
        self.endpoint = self._status.endpoint  # the endpoint to which followers send HELLO
        self._operations = RankRouter(context, endpoints[1])
        # Addresses of the ranks on other machines:
        self._elsewhere = {
            rank: hosts[rank].addresses
            for rank, is_local in enumerate(are_local(tuple(hosts)))
            if not is_local
        }
        self._secret = secrets.token_bytes(16)
        self._versions = own_versions()
        self._sent_count = 0  # operations sent
        self._comparison = WitnessComparison(range(1, self.size))
        self._watch = RankWatch(self.hosts, stall_s, awake_s())
        self._ranks: dict[bytes, int] = {}  # connection -> rank; link's thread
        self._lost: tuple[int, str, float] | None = None  # (first lost rank, why, since when)
        self._peers: dict[int, bytes] = {}  # rank -> operations' connection; inference thread
        self._are_all_in = threading.Event()
        self._is_closed = threading.Event()
        self._is_ending = False
        self._failing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    # ------------------------------------------------------------ the inference thread

    def wait_for_all(self, is_over: Callable[[], bool]) -> None:
        """Wait until every follower has joined. Raises: SystemExit: the process ends."""
        self._thread.start()
        while not self._are_all_in.wait(CHECK_S):
            if is_over():
                raise SystemExit
        while len(self._peers) < self.size - 1:
            received = self._operations.receive(CHECK_S)
            if is_over():
                raise SystemExit
            if received is None:
                continue
            try:
                kind, rank, secret = read_message(received[2])
            except (WireError, ValueError) as error:
                log.warning("bad message of a rank dropped: %s", error)
                continue
            if kind == HERE and secret == self._secret and rank in range(1, self.size):
                self._peers[rank] = received[0]

    def send(self, name: str, *arguments: Value, drops: Sequence[int] = ()) -> None:
        """Send operation `name` to all followers, which do operations in order. Never waits."""
        self._send_operation([name, arguments, drops, False])

    def request(self, name: str, *arguments: Value, drops: Sequence[int] = ()) -> list[Any]:
        """Send operation `name` to all followers; return the answers of ranks 1 to size - 1."""
        self._send_operation([name, arguments, drops, True])
        answers: dict[bytes, Any] = {}
        while len(answers) < self.size - 1:
            received = self._operations.receive(CHECK_S)
            self._check_failure()
            if received is not None and received[0] in self._peers.values():
                answers[received[0]] = unpack(received[2])
        return [answers[self._peers[rank]] for rank in range(1, self.size)]

    def witness(self, *facts: Value) -> None:
        """Record a fact about the computation; every follower must record the same fact next."""
        self._comparison.record_own(pack(facts))

    def wait_for_failure(self) -> None:
        """Wait until this link finds the lost rank; then the process may end.

        Called after a failed computation: collectives fail when a neighbouring rank is gone.
        """
        self._is_closed.wait(FAILURE_WAIT_S)

    def _send_operation(self, operation: list[Value | Sequence[Value]]) -> None:
        frame = pack(operation)
        self._sent_count += 1
        for rank, peer in self._peers.items():
            try:
                self._operations.send(peer, frame)
            except RankGone as error:
                self.report_lost(rank, self.how_ended(rank) or str(error))
                self.wait_for_failure()
        self._check_failure()

    def _check_failure(self) -> None:
        """Raise RankLost if `end` returned, as it does in tests."""
        if self.failure:
            raise RankLost(self.failure)

    # ------------------------------------------------------------ any thread

    def report_lost(self, rank: int, why: str) -> None:
        """Report that `rank` is gone: the process ends once its last messages are read."""
        self._lost = self._lost or (rank, why, awake_s())

    def _fail(self, why: str, code: int = EXIT_RANK_LOST) -> None:
        with self._failing:
            if self.failure or self._is_ending:
                return
            self.failure = why
        log.error("all ranks end: %s", why)
        self._end(code, why)

    # ------------------------------------------------------------ the link's thread

    def _run(self) -> None:
        ticked_at = awake_s()
        try:
            while not self._is_closed.is_set():
                received = self._status.receive(TICK_S)
                if received is not None:
                    self._receive(*received)
                now_s = awake_s()
                if self._lost and (received is None or now_s - self._lost[2] >= LAST_WORDS_S):
                    rank, why, _ = self._lost
                    self._fail(f"{self._watch.name(rank)} is gone: {why}")
                if now_s - ticked_at >= TICK_S:
                    self._tick(now_s, now_s - ticked_at)
                    ticked_at = now_s
        except Exception:
            log.exception("the thread of the ranks broke")
            self._fail("rank 0's own thread for the other ranks broke; the log says how")

    def _tick(self, now_s: float, elapsed_s: float) -> None:
        if elapsed_s > STOOD_STILL_S:
            self._watch.restart_timers(now_s)
        for peer, rank in list(self._ranks.items()):
            try:
                self._status.send(peer, b"")  # a sign of life
            except RankGone as error:
                if self._are_all_in.is_set():
                    self.report_lost(rank, self.how_ended(rank) or str(error))
                else:
                    log.warning("%s left before all were there", self._watch.name(rank))
                    del self._ranks[peer]
        if self._are_all_in.is_set() and (wrong := self._watch.check(now_s)):
            self._fail(f"{wrong}. Is that machine awake, and its cable in?")

    def _receive(self, peer: bytes, address: str, frame: bytes) -> None:
        try:
            kind, *items = read_message(frame)
            rank = self._ranks.get(peer)
            if rank is not None:
                self._receive_from(rank, kind, items)
            elif kind == HELLO:
                own_rank, versions = items
                self._greet(peer, address, own_rank, versions)
        except (WireError, ValueError) as error:
            log.warning("bad message of a rank dropped: %s", error)

    def _receive_from(self, rank: int, kind: str, items: list[Any]) -> None:
        now_s = awake_s()
        self._watch.record_heard(rank, now_s)
        try:
            if kind == WITNESS:
                (facts,) = items
                self._comparison.record(rank, facts)
            elif kind == EVENT:
                name, arguments = items
                self.on_event(rank, name, arguments)
            elif kind == BEAT:
                done, is_waiting, witnessed, limit, used = items
                beat, own = RankBeat(done, is_waiting, witnessed), self._comparison.own_count
                wrong = self._watch.record_beat(rank, beat, self._sent_count, own, now_s)
                self.rank_memory[rank] = RankMemory(limit, used)
                self._comparison.compare(rank)
                if wrong:
                    self._fail(wrong)
            elif kind == FAILED:
                can_restart, why = items
                code = EXIT_RANK_LOST if can_restart else EXIT_CANNOT_START
                self._fail(f"{self._watch.name(rank)}: {why}", code)
        except RankMismatch as error:
            self._fail(f"the ranks computed different things at {error}")

    def _greet(self, peer: bytes, address: str, own_rank: Any, versions: Any) -> None:
        """Welcome a follower, or refuse it with the reason."""
        rank: int = self._free_rank(address) if own_rank is None else own_rank
        if rank not in range(1, self.size) or rank in self._ranks.values():
            text = f"rank 0 waits for no rank at {address or 'this machine'}: its host file has "
            text += f"{', '.join(self.hosts)}. Another address of that machine is told with "
            self._refuse(peer, text + "hearth ranks join --address.")
        elif wrong := difference(self._versions, versions):
            self._refuse(peer, f"{wrong}. Install the same on both.")
            name = f"{self._watch.name(rank)} cannot take part"
            self._fail(f"{name}: {wrong}. Install the same on both.", EXIT_CANNOT_START)
        else:
            self._welcome(peer, rank)

    def _free_rank(self, address: str) -> int:
        """Return the first rank at `address` that has not joined; 0 = none is expected there."""
        free = self._elsewhere.keys() - self._ranks.values()
        return min((rank for rank in free if address in self._elsewhere[rank]), default=0)

    def _refuse(self, peer: bytes, why: str) -> None:
        log.warning("a rank is refused: %s", why)
        self._answer(peer, [REFUSED, why])

    def _welcome(self, peer: bytes, rank: int) -> None:
        own = {"rank": rank, "secret": self._secret, "operations": self._operations.endpoint}
        self._answer(peer, [WELCOME, {**own, "hosts": self.hosts, **self._welcome_fields}])
        self._ranks[peer] = rank
        self._watch.record_heard(rank, awake_s())
        log.info("%s is there", self._watch.name(rank))
        if len(self._ranks) == self.size - 1:
            self._watch.restart_timers(awake_s())
            self._are_all_in.set()

    def _answer(self, peer: bytes, items: list[Any]) -> None:
        try:
            self._status.send(peer, pack(items))
        except RankGone:
            log.warning("a rank that said hello is gone")

    def close(self) -> None:
        """Stop watching; the followers notice that rank 0 is gone. Not on the link's thread."""
        self._is_ending = True  # all ranks end now: none counts as lost
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._status.close()
        self._operations.close()
        self._context.close()

"""The I/O thread: everything that arrives or leaves by socket. Never waits for the model."""

import logging
import math
import os
import queue
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hearth.shared.errors import RETRY_AFTER_S_MAX, Overloaded
from hearth.shared.wire_messages import (
    PROTOCOL_VERSION,
    Cancel,
    Count,
    Counted,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Progress,
    Renew,
    Status,
    Submit,
    Told,
    Up,
    Welcome,
)
from hearth.shared.zmq_transport import HEARTBEAT_S, RouterPort
from hearth.worker.schedule.request_state import ClientLease, MessageWithImages, RenderNextPrompt

log = logging.getLogger(__name__)

WireJob = Submit | Count | Status
Jobs = queue.SimpleQueue[tuple[ClientLease, WireJob | RenderNextPrompt | MessageWithImages] | None]
ERRANDS = ("cache", "clear_cache", "unpin")  # what the inference thread tells or does
ANSWERS = (Finished, Failed, Counted, Told)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Which start of which worker this is."""

    worker_id: int
    boot_id: str


class WireThread:
    """Owns the socket and the table of open requests. Owner: the main thread.

    Every Submit, Count and Status in `_open` leaves it by exactly one answer. `send` is the one
    method that other threads call.
    """

    def __init__(
        self,
        port: RouterPort,
        identity: WorkerIdentity,
        jobs: Jobs,
        heartbeat: Callable[[Sequence[str]], Heartbeat],
        open_max: int,
        is_supervised: bool = True,
    ) -> None:
        """`heartbeat` is given the ids of the requests that the scheduler has not seen yet.

        `is_supervised`: who started this worker holds the other end of its stdin.
        """
        self._port = port
        self._identity = identity
        self._jobs = jobs
        self._heartbeat = heartbeat
        self._open_max = open_max
        self._is_supervised = is_supervised
        self._open: dict[str, ClientLease] = {}
        self._arriving: dict[str, None] = {}  # the Submits of those that are being rendered
        self._peers: set[bytes] = set()
        self._next_beat = 0.0
        # Hands a Status to the inference thread; set once the model is loaded.
        self.errand: Callable[[ClientLease, Status], None] | None = None

    def run(self, is_stopping: Callable[[], bool]) -> None:
        """Work until told to stop, or until the supervisor's end of our stdin closes."""
        while not is_stopping():
            for peer, message in self._port.turn(self._wait_s()):
                self._handle(peer, message)
            if self._port.gone:
                self._forget_gone_peers()
            if time.monotonic() >= self._next_beat:
                if self._is_supervised and _supervisor_is_gone():
                    return
                self._beat()

    def send(self, message: Up) -> None:
        """Send to whoever asked. An answer closes its request. Any thread."""
        request_id: str = getattr(message, "request_id", "")
        ticket = self._open.get(request_id)
        if ticket is None:
            return
        if isinstance(message, (Progress, *ANSWERS)):
            self._arriving.pop(request_id, None)
        if isinstance(message, ANSWERS):
            self._open.pop(request_id, None)
        self._port.post(ticket.peer, message)

    def _handle(self, peer: bytes, message: Message) -> None:
        match message:
            case Hello():
                self._peers.add(peer)
                self._port.post(peer, self._welcome())
                self._port.post(peer, self._load())
            case Submit() | Count() | Status():
                self._accept(peer, message)
            case Cancel(request_id):
                self._cancel(request_id)
            case Renew(request_ids):
                for request_id in request_ids:
                    if ticket := self._open.get(request_id):
                        ticket.renew()
            case _:
                log.warning("a proxy never sends %s; dropped", type(message).__name__)

    def _accept(self, peer: bytes, message: WireJob) -> None:
        failure = self._refusal(message)
        if failure is not None:
            self._port.post(peer, failure)
            return
        ticket = ClientLease(message.request_id, peer)
        self._open[message.request_id] = ticket
        if isinstance(message, Submit):
            self._arriving[message.request_id] = None
        if isinstance(message, Status) and message.what in ERRANDS:
            assert self.errand is not None, "ready workers have it"
            self.errand(ticket, message)
        else:
            self._jobs.put((ticket, message))

    def _refusal(self, message: WireJob) -> Failed | None:
        request_id = message.request_id
        if request_id in self._open:
            return Failed(request_id, 400, "duplicate_request", "This request id is in use.")
        beat = self._load()
        if beat.state != "ready":
            text = "The model is still loading. Try again in a few seconds."
            return Failed(request_id, 503, "model_loading", text)
        if len(self._open) >= self._open_max and not isinstance(message, Status):
            return self._overloaded(request_id, beat)
        return None

    def _overloaded(self, request_id: str, beat: Heartbeat) -> Failed:
        retry_after_s = min(max(1, math.ceil(beat.wait_s)), RETRY_AFTER_S_MAX)
        text = (
            f"{len(self._open)} requests are in this worker ({beat.running} run, {beat.waiting} "
            f"wait) and it takes {self._open_max}. One more would wait for about "
            f"{beat.wait_s:,.0f} s. Try again in {retry_after_s} s, or raise QUEUE_MAX."
        )
        return Failed(request_id, 503, Overloaded.CODE, text, retry_after_s)

    def _load(self) -> Heartbeat:
        return self._heartbeat(list(self._arriving))

    def _cancel(self, request_id: str) -> None:
        ticket = self._open.get(request_id)
        if ticket is not None:
            ticket.is_cancelled = True

    def _forget_gone_peers(self) -> None:
        for peer in [self._port.gone.pop() for _ in range(len(self._port.gone))]:
            self._peers.discard(peer)
            for ticket in list(self._open.values()):
                if ticket.peer == peer:
                    ticket.is_cancelled = True

    def _welcome(self) -> Welcome:
        return Welcome(
            PROTOCOL_VERSION, self._identity.worker_id, self._identity.boot_id, os.getpid()
        )

    def _wait_s(self) -> float:
        return max(0.0, min(HEARTBEAT_S, self._next_beat - time.monotonic()))

    def _beat(self) -> None:
        self._next_beat = time.monotonic() + HEARTBEAT_S
        beat = self._load()
        for peer in self._peers:
            self._port.post(peer, beat)


def _supervisor_is_gone() -> bool:
    """Whether stdin reached its end: the supervisor holds the other end while it lives."""
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable) and os.read(sys.stdin.fileno(), 4096) == b""

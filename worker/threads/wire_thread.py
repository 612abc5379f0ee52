"""Receives and sends all messages of a worker: sockets, leases, heartbeats. Never waits for MLX."""

import logging
import math
import os
import queue
import secrets
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, get_args

from hearth.shared.errors import RETRY_AFTER_S_MAX, Overloaded
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import (
    PROTOCOL_VERSION,
    Answer,
    Cancel,
    Count,
    Embed,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Progress,
    Renew,
    Rerank,
    ShortTurns,
    Status,
    Submit,
    Up,
    Welcome,
)
from hearth.shared.zmq_transport import HEARTBEAT_S, RouterPort
from hearth.worker.schedule.client_lease import ClientLease

if TYPE_CHECKING:  # an embedding worker does not load this module
    from hearth.worker.threads.thread_queues import ImageJobs, PromptLanes

log = logging.getLogger(__name__)

WireJob = Submit | Count | Status | Embed | Rerank
ANSWERS: Final = get_args(Answer)
# Values of `Status.what` that the inference thread answers:
INFERENCE_TASKS = ("cache", "clear_cache", "unpin", "doctor", "check_again")
ENDING = "The worker of this request ends. Send the request again."


class WireThread:
    """Holds the socket and the table of open requests. Owner: the main thread.

    Invariants: exactly one answer removes a request from `_open`, and `_arriving` is a subset of
    `_open`. Other threads call only `send` and `beat_now`.
    """

    def __init__(
        self,
        port: RouterPort,
        worker_id: int,
        jobs: "PromptLanes | queue.SimpleQueue[Any]",
        heartbeat: Callable[[Sequence[str]], Heartbeat],
        open_max: int,
    ) -> None:
        """`heartbeat` takes the ids of the requests that the scheduler has not received yet."""
        self._port = port
        self._worker_id, self._boot_id = worker_id, secrets.token_hex(8)  # new at each start
        self._put: Callable[[tuple[ClientLease, Any]], None] = jobs.put
        self._heartbeat = heartbeat
        self.open_max = open_max
        self._is_ending = False
        self._open: dict[str, ClientLease] = {}
        self._arriving: dict[str, None] = {}  # ids of the Submits that are being rendered
        self._peers: set[bytes] = set()
        self._next_beat = 0.0
        self.short_turns = False  # whether an embedding worker must use short forwards
        # Set once the model is loaded, before the first heartbeat with "ready".
        self.run_in_inference: Callable[[Status], None] | None = None
        self.image_jobs: ImageJobs | None = None  # stays None for a model that takes no images

    def run(self, is_stopping: Callable[[], bool]) -> None:
        """Work until `is_stopping`, or until the supervisor closes this worker's stdin.

        During a shutdown, stdin is not read.
        """
        while not is_stopping():
            until_beat_s = min(HEARTBEAT_S, self._next_beat - awake_s())
            for peer, message in self._port.poll(max(0.0, until_beat_s)):
                self.handle(peer, message)
            if self._port.gone:
                self.forget_gone_peers()
            if awake_s() >= self._next_beat:
                # stdin ends when the supervisor is gone, which holds the other end of the pipe.
                readable, _, _ = select.select([sys.stdin], [], [], 0)
                if readable and not self._is_ending and not os.read(sys.stdin.fileno(), 4096):
                    return
                self._next_beat = awake_s() + HEARTBEAT_S
                beat = self._make_heartbeat()
                for peer in self._peers:
                    self._port.post(peer, beat)

    def send(self, message: Up) -> None:
        """Send a message to the proxy of its request. An answer closes the request. Any thread."""
        request_id: str = getattr(message, "request_id", "")
        is_answer = isinstance(message, ANSWERS)
        # `pop` is one step of the interpreter: if two threads answer, only one finds the request.
        lease = self._open.pop(request_id, None) if is_answer else self._open.get(request_id)
        if lease is None:
            return
        if is_answer or isinstance(message, Progress):
            self._arriving.pop(request_id, None)
        self._port.post(lease.peer, message)

    def beat_now(self) -> None:
        """Send a heartbeat at once, because the model is loaded. Any thread."""
        self._next_beat = 0.0
        self._port.wake()

    def end_requests(self, *, sends_failures: bool) -> None:
        """Refuse new requests from now on, and fail the open requests if asked. Main thread.

        Without failures, clients notice the end of the process. A broken worker sends none, because
        an open request may have broken the worker, and no other worker may get that request.
        """
        self._is_ending = True
        for request_id in list(self._open) if sends_failures else ():
            self.send(_ending(request_id))

    def handle(self, peer: bytes, message: Message) -> None:
        """Act on one message of a proxy. Main thread."""
        match message:
            case Hello():
                self._peers.add(peer)
                identity = (self._worker_id, self._boot_id, os.getpid())
                self._port.post(peer, Welcome(PROTOCOL_VERSION, *identity))
                self._port.post(peer, self._make_heartbeat())
            case Submit() | Count() | Status() | Embed() | Rerank():
                self._accept(peer, message)
            case Cancel(request_id):
                if lease := self._open.get(request_id):
                    lease.is_cancelled = True
            case Renew(request_ids):
                for request_id in request_ids:
                    if lease := self._open.get(request_id):
                        lease.renew()
            case ShortTurns(are_wanted):
                self.short_turns = are_wanted
            case _:
                log.warning("a proxy never sends %s; dropped", type(message).__name__)

    def _accept(self, peer: bytes, message: WireJob) -> None:
        failure = self._refusal(message)
        if failure is not None:
            self._port.post(peer, failure)
            return
        assert message.request_id not in self._open, message.request_id
        lease = ClientLease(message.request_id, peer)
        self._open[message.request_id] = lease
        if isinstance(message, Submit):
            self._arriving[message.request_id] = None
        if isinstance(message, Submit | Count):
            if message.prompt.images and self.image_jobs is not None:
                self.image_jobs.put((lease, message))
                return
        elif isinstance(message, Status) and message.what in INFERENCE_TASKS:
            assert self.run_in_inference is not None, "a ready worker lacks run_in_inference"
            self.run_in_inference(message)
            return
        self._put((lease, message))

    def _refusal(self, message: WireJob) -> Failed | None:
        request_id = message.request_id
        if request_id in self._open:
            return Failed(request_id, 400, "duplicate_request", "This request id is in use.")
        if self._is_ending:
            return _ending(request_id)
        beat = self._make_heartbeat()
        if beat.state != "ready":
            text = "The model is still loading. Try again in a few seconds."
            return Failed(request_id, 503, "model_loading", text)
        if len(self._open) >= self.open_max and not isinstance(message, Status):
            retry_after_s = min(max(1, math.ceil(beat.wait_s)), RETRY_AFTER_S_MAX)
            text = (
                f"{len(self._open)} requests are in this worker ({beat.running} run, "
                f"{beat.waiting} wait) and it takes {self.open_max}. One more would wait for about "
                f"{beat.wait_s:,.0f} s. Try again in {retry_after_s} s, or raise QUEUE_MAX."
            )
            return Failed(request_id, 503, Overloaded.CODE, text, retry_after_s)
        return None

    def _make_heartbeat(self) -> Heartbeat:
        beat = self._heartbeat(list(self._arriving))
        return replace(beat, requests_max=self.open_max)

    def forget_gone_peers(self) -> None:
        """Cancel the requests of proxies that are gone. Main thread."""
        for peer in [self._port.gone.pop() for _ in range(len(self._port.gone))]:
            self._peers.discard(peer)
            for lease in list(self._open.values()):
                if lease.peer == peer:
                    lease.is_cancelled = True


def _ending(request_id: str) -> Failed:
    return Failed(request_id, 503, Overloaded.CODE, ENDING, Overloaded.RETRY_AFTER_S)

"""The sockets between proxy and worker: the only module that imports zmq.

A worker binds one ROUTER; each proxy connects one DEALER. `ROUTER_MANDATORY` makes a send to a
peer that is gone, or whose queue is full, an error instead of a silent loss.
"""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import sys
from collections import deque
from pathlib import Path

import zmq
import zmq.asyncio

from shared.errors import StartError, WireError
from shared.wire import FRAME_BYTES_MAX, Failed, Message, decode, encode

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0  # a worker tells everyone it knows that it is there
SILENCE_S_MAX = 15.0  # a worker silent for this long is taken for hung
LEASE_RENEW_S = 1.0
LEASE_S = 5.0  # a request not renewed for this long is cancelled
QUEUE_FRAMES_MAX = 20_000  # frames held for one peer before it counts as gone
IPC_PATH_BYTES_MAX = 103 if sys.platform == "darwin" else 107  # sun_path less its NUL


def private_directory(path: Path) -> Path:
    """Make `path` a directory that only this user can enter, and return it.

    Raises:
        StartError: it belongs to someone else, is not a directory, or cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StartError(
            f"RUN_DIR: {path} cannot be made ({error.strerror}). Set RUN_DIR."
        ) from None
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StartError(f"RUN_DIR: {path} is not a directory. Remove it or set RUN_DIR.")
    if status.st_uid != os.getuid():
        raise StartError(f"RUN_DIR: {path} belongs to user {status.st_uid}. Set RUN_DIR.")
    path.chmod(0o700)
    return path


def ipc_endpoint(path: Path) -> str:
    """Return the endpoint of a Unix socket at `path`.

    Raises:
        StartError: the path is longer than the platform's socket addresses.
    """
    length = len(os.fsencode(path))
    if length > IPC_PATH_BYTES_MAX:
        raise StartError(
            f"RUN_DIR: the socket path {path} is {length} bytes and this platform takes "
            f"{IPC_PATH_BYTES_MAX}. Set RUN_DIR to a shorter directory."
        )
    return f"ipc://{path}"


class RouterPort:
    """A worker's end. Owner: the I/O thread; only `post` may be called from other threads.

    Frames that cannot be sent at once wait in order, per peer, up to QUEUE_FRAMES_MAX.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._socket.bind(endpoint)
        if endpoint.startswith("ipc://"):
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read.fileno(), zmq.POLLIN)
        self._is_woken = False  # a wake is on its way: another one would tell nothing new
        self._outbox: deque[tuple[bytes, Message]] = deque()
        self._held: dict[bytes, deque[bytes]] = {}  # peer -> frames its queue had no room for
        self.gone: set[bytes] = set()  # peers that a send found missing, for the owner to collect
        self.bad_frame_count = 0

    def post(self, peer: bytes, message: Message) -> None:
        """Queue `message` for `peer` and wake the owner. Any thread; never blocks."""
        self._outbox.append((peer, message))
        if not self._is_woken:
            self.wake()

    def wake(self) -> None:
        """End the owner's wait. Any thread, and signal handlers."""
        self._is_woken = True
        with contextlib.suppress(OSError):  # full: that wakes just as well; closed: nobody waits
            self._wake_write.send(b"\0")

    def turn(self, wait_s: float) -> list[tuple[bytes, Message]]:
        """Send what was posted, wait up to `wait_s` for something to happen, return what came."""
        self._flush()
        retry_soon = 0.02 if self._held else wait_s
        ready = {where for where, _ in self._poller.poll(int(min(wait_s, retry_soon) * 1000))}
        if self._wake_read.fileno() in ready:
            self._wake_read.recv(65536)
        self._is_woken = False  # before the flush: what is posted from here on wakes again
        self._flush()
        return self._receive() if self._socket in ready else []

    def _receive(self) -> list[tuple[bytes, Message]]:
        received = []
        for _ in range(256):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames where one is spoken")
                received.append((peer, decode(frames[0])))
            except WireError as error:
                self.bad_frame_count += 1
                log.warning("bad frame dropped count=%d: %s", self.bad_frame_count, error)
        return received

    def _flush(self) -> None:
        for peer, frames in list(self._held.items()):
            while frames and self._send(peer, frames[0]):
                frames.popleft()
            if not frames:
                self._held.pop(peer, None)
        while self._outbox:
            peer, message = self._outbox.popleft()
            if peer in self.gone:
                continue
            frame = _frame(message)
            if peer in self._held or not self._send(peer, frame):
                self._hold(peer, frame)

    def _hold(self, peer: bytes, frame: bytes) -> None:
        if peer in self.gone:
            return
        held = self._held.setdefault(peer, deque())
        held.append(frame)
        if len(held) > QUEUE_FRAMES_MAX:
            log.warning("peer does not read: %d frames wait; it counts as gone", len(held))
            self._drop(peer)

    def _send(self, peer: bytes, frame: bytes) -> bool:
        """Send now. False: no room yet. A peer that is gone takes everything, into nothing."""
        try:
            self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(peer)
        return True

    def _drop(self, peer: bytes) -> None:
        self.gone.add(peer)
        self._held.pop(peer, None)

    def close(self) -> None:
        self._flush()
        self._socket.close()
        self._context.term()
        if self._endpoint.startswith("ipc://"):
            Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        self._wake_read.close()
        self._wake_write.close()


def _frame(message: Message) -> bytes:
    """Return the frame of an answer; of one that cannot be carried, that of a Failed.

    Raises:
        WireError: it is nobody's answer.
    """
    try:
        return encode(message)
    except WireError as error:
        request_id = getattr(message, "request_id", None)
        if request_id is None:
            raise
        log.error("an answer cannot be carried request=%s: %s", request_id, error)
        return encode(Failed(request_id, 500, "internal_error", "The answer cannot be carried."))


class QueueFull(WireError):
    """The worker stopped reading long ago."""


class DealerLink:
    """A proxy's end of the line to one start of one worker. Owner: the event loop."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES_MAX)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES_MAX)
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.connect(endpoint)

    def send(self, message: Message) -> None:
        """Queue `message` without waiting.

        Raises:
            WireError: it cannot be encoded.
            QueueFull: the worker stopped reading long ago.
        """
        frame = encode(message)
        future = self._socket.send(frame, zmq.NOBLOCK)
        assert isinstance(future, asyncio.Future), type(future)
        if future.done() and future.exception() is not None:
            raise QueueFull(f"the worker's queue is full ({QUEUE_FRAMES_MAX} frames)")

    async def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            WireError: a frame that is not a message; the next call may succeed.
        """
        return decode(await self._socket.recv())

    def close(self) -> None:
        self._socket.close()

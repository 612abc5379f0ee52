"""Connects the ranks of one worker over ZeroMQ: rank 0 binds, the others connect.

An ipc:// connection is protected by its private directory, a tcp:// connection by CURVE keys, which
are required.
"""

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

import zmq

from hearth.shared.errors import StartError
from hearth.shared.zmq_transport import (
    CurveKeys,
    SocketOptions,
    check_endpoint,
    client_options,
    curve_guard,
    server_options,
    set_options,
)

FRAME_BYTES_MAX: Final = 32 << 20
QUEUE_FRAMES_MAX: Final = 20_000  # frames queued for one rank before sends to it fail
_BOUNDS: Final[SocketOptions] = {
    zmq.SNDHWM: QUEUE_FRAMES_MAX,
    zmq.RCVHWM: QUEUE_FRAMES_MAX,
    zmq.MAXMSGSIZE: FRAME_BYTES_MAX,
}


class RankGone(Exception):
    """The other end of a connection is gone, or does not read."""


class RankContext:
    """Holds the zmq context and keys that the sockets of a rank share. Close it last."""

    def __init__(self, keys: CurveKeys | None, *, is_leader: bool) -> None:
        self.keys = keys
        self.zmq = zmq.Context()
        self._guard = curve_guard(self.zmq, keys) if keys is not None and is_leader else None

    def close(self) -> None:
        if self._guard is not None:
            self._guard.stop()
        self.zmq.term()


class RankRouter:
    """Carries one kind of messages at rank 0. Owner: one thread.

    A send to a rank that is gone or does not read raises RankGone.
    """

    def __init__(self, context: RankContext, endpoint: str) -> None:
        """Bind; port 0 stands for any free port.

        Raises:
            StartError: the endpoint cannot be bound, or is on the network without keys.
        """
        check_endpoint(endpoint, context.keys)
        self._socket = socket = context.zmq.socket(zmq.ROUTER)
        set_options(socket, {**_BOUNDS, zmq.ROUTER_MANDATORY: 1, zmq.LINGER: 0})
        if context.keys is not None:
            set_options(socket, server_options(context.keys))
        path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
        if path is not None:
            path.unlink(missing_ok=True)  # the socket of a worker that died
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            text = f"{endpoint} cannot be bound: {os.strerror(error.errno or 0)}."
            if path is None:
                text += " Set PROXY_PORT to one 100 below a port that no other server has, and "
                text += "name first in RANK_HOSTS an address of this machine."
            raise StartError(text) from None
        if path is not None:
            path.chmod(0o600)
        self._path = path
        self.endpoint = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def send(self, peer: bytes, frame: bytes) -> None:
        """Send without waiting. Raises: RankGone."""
        try:
            self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.Again:
            raise RankGone(f"it reads nothing: {QUEUE_FRAMES_MAX:,} messages wait") from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise RankGone("its connection ended") from None

    def receive(self, wait_s: float) -> tuple[bytes, str, bytes] | None:
        """Return (peer, address, frame) of the next message; the address is "" over ipc://.

        None if no message came within `wait_s`, or if the message had not exactly one frame.
        """
        if not self._socket.poll(int(wait_s * 1000)):
            return None
        parts = self._socket.recv_multipart(copy=False)
        if len(parts) != 2:
            return None
        peer, frame = parts
        address = str(frame.get("Peer-Address")) if self._path is None else ""
        return peer.bytes, address, frame.bytes

    def close(self) -> None:
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class RankDealer:
    """Carries the messages of one follower (a rank other than 0).

    Either any thread calls `send` and `take_waiting`, or a single one calls `send` and `receive`.
    """

    def __init__(self, context: RankContext, endpoint: str, address: str = "") -> None:
        """Connect; over tcp:// from this machine's `address`, if one is given.

        Raises:
            StartError: the endpoint is invalid, or is on the network without keys.
        """
        check_endpoint(endpoint, context.keys)
        self._lock = threading.Lock()
        self._socket = socket = context.zmq.socket(zmq.DEALER)
        set_options(
            socket,
            {
                **_BOUNDS,
                zmq.LINGER: 500,
                zmq.RECONNECT_IVL: 100,
                zmq.RECONNECT_IVL_MAX: 1000,
                zmq.IDENTITY: os.urandom(16),
            },
        )
        if endpoint.startswith("tcp://"):
            set_options(socket, client_options(context.keys))
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        if address and endpoint.startswith("tcp://"):
            endpoint = f"tcp://{address}:0;{endpoint.removeprefix('tcp://')}"
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise StartError(f"{endpoint} cannot be connected to: {error.strerror}.") from None

    def send(self, frame: bytes) -> None:
        """Send without waiting. Raises: RankGone."""
        with self._lock:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                text = f"rank 0 reads nothing: {QUEUE_FRAMES_MAX:,} messages wait"
                raise RankGone(text) from None

    def take_waiting(self) -> bytes | None:
        """Return the next message if one has arrived, else None. Any thread."""
        with self._lock, contextlib.suppress(zmq.Again):
            return bytes(self._socket.recv(zmq.NOBLOCK))
        return None

    def wait_for_end(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for the connection's end; return whether it ended. One thread."""
        return bool(self._monitor.poll(int(wait_s * 1000)))

    def receive(self, wait_s: float | None) -> bytes | None:
        """Return the next message, or None if none came in `wait_s`; None waits without limit."""
        if wait_s is not None and not self._socket.poll(int(wait_s * 1000)):
            return None
        return bytes(self._socket.recv())

    def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

"""Connects proxy and worker over ZeroMQ; `zmq_rank_port` connects the ranks of one worker.

A worker has one ROUTER socket. Its supervisor connects to it over ipc://, and proxies on other
machines over tcp://; each of them has one DEALER socket. With `ROUTER_MANDATORY` a send to a lost
peer or a full queue fails instead of losing the frame silently. An ipc:// connection is protected
by its private directory, a tcp:// connection by CURVE keys, which are required.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import stat
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from zmq.auth import load_certificate
from zmq.auth.thread import ThreadAuthenticator

from hearth.shared.errors import StartError, WireError
from hearth.shared.private_files import private_directory
from hearth.shared.wire_messages import FRAME_BYTES_MAX, Failed, Message, decode, encode

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0  # between two heartbeats of a worker
SILENCE_S_MAX = 15.0  # a worker silent for this long counts as hung
LEASE_RENEW_S = 1.0
LEASE_S = 5.0  # a request not renewed for this long is cancelled
QUEUE_FRAMES_MAX = 20_000  # frames queued for one peer before it counts as gone
HANDSHAKE_S_MAX = 5.0  # time for a connection to present a valid key
TAKEN_FRAMES_MAX = 256  # frames read at once before the event loop runs other tasks
IPC_PATH_BYTES_MAX = 103 if sys.platform == "darwin" else 107  # sun_path without NUL
SHORT_LINKS_DIR: Final = Path(f"/tmp/hearth-{os.getuid()}")
_READABLE: Final = int(zmq.POLLIN)  # a plain int: comparing zmq's enum takes a microsecond

WORKER_NAME: Final = "worker"  # stem of the key files worker.key and worker.key_secret
PROXY_NAME: Final = "proxy"
RANK_NAME: Final = "rank"  # all ranks of a model share one key pair and trust it
SocketOptions = Mapping[int, int | bytes]
_Z85_KEY_CHARS: Final = 40
_MAKE_KEYS: Final = (
    "Make them once, with hearth keys on any of the machines, and copy those that it names for "
    "this one into CURVE_KEYS_DIR."
)


def ipc_endpoint(path: Path) -> str:
    """Return the endpoint of a Unix socket at `path`, through a symlink if the path is too long.

    Raises:
        StartError: the directory of the symlinks belongs to another user.
    """
    if len(os.fsencode(path)) > IPC_PATH_BYTES_MAX:
        # HOME may be long, for example. The link's directory is private to this user.
        name = hashlib.blake2b(os.fsencode(path.parent), digest_size=8).hexdigest()
        link = private_directory(SHORT_LINKS_DIR) / name
        with contextlib.suppress(FileExistsError):
            link.symlink_to(path.parent)
        path = link / path.name
    return f"ipc://{path}"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The key pair of one end of a tcp:// connection, and the key it trusts. All in Z85."""

    public: bytes
    secret: bytes
    trusted: bytes  # the other end's public key

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"


def curve_keys(directory: Path, own: str, other: str) -> CurveKeys:
    """Return the keys of `own` for connections with `other`; both are names of key files.

    Raises:
        StartError: a file is missing, holds no key, or holds a secret that other users can read.
    """
    secret_file, trusted_file = directory / f"{own}.key_secret", directory / f"{other}.key"
    try:
        mode = secret_file.stat().st_mode
        public, secret = load_certificate(secret_file)
        trusted, _ = load_certificate(trusted_file)
    except (OSError, ValueError) as error:
        raise StartError(f"tcp:// needs CURVE keys: {error}. {_MAKE_KEYS}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StartError(
            f"{secret_file} has mode {stat.S_IMODE(mode):04o}: others may have read it. "
            "Make new keys, or run: chmod 600 " + str(secret_file)
        )
    if secret is None or {len(public), len(secret), len(trusted)} != {_Z85_KEY_CHARS}:
        raise StartError(f"{secret_file} or {trusted_file} holds no CURVE key. {_MAKE_KEYS}")
    return CurveKeys(public, secret, trusted)


def server_options(keys: CurveKeys) -> SocketOptions:
    """Return the options of a socket that requires keys; `curve_guard` decides which keys."""
    return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: keys.secret}


def client_options(keys: CurveKeys | None) -> SocketOptions:
    """Return the options of a socket that presents its keys to the one server that it trusts."""
    if keys is None:
        return {}
    return {
        zmq.CURVE_SERVERKEY: keys.trusted,
        zmq.CURVE_PUBLICKEY: keys.public,
        zmq.CURVE_SECRETKEY: keys.secret,
    }


def set_options(socket: "zmq.Socket[bytes]", options: SocketOptions) -> None:
    for option, value in options.items():
        socket.setsockopt(option, value)


class RouterPort:
    """Connects a worker to its proxies. Owner: the wire thread; `post` and `wake`: any thread.

    zmq queues up to QUEUE_FRAMES_MAX frames for a peer; a peer with a full queue counts as gone.
    Invariant: a tcp:// endpoint is bound last, as endpoints bound later would require its keys.
    """

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        """Bind, as `listen` does. Raises: StartError."""
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._guard: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        set_options(
            self._socket,
            {
                zmq.ROUTER_MANDATORY: 1,
                zmq.LINGER: 500,
                zmq.SNDHWM: QUEUE_FRAMES_MAX,
                zmq.HANDSHAKE_IVL: int(HANDSHAKE_S_MAX * 1000),
                zmq.MAXMSGSIZE: FRAME_BYTES_MAX,
            },
        )
        self.listen(endpoint, keys)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read.fileno(), zmq.POLLIN)
        self._is_woken = False  # a wake byte is in the socket pair already
        # Kept for a moment: frames that wait for a socket
        self.outbox: deque[tuple[bytes, Message]] = deque()
        self.gone: set[bytes] = set()  # peers whose send failed, for the owner to collect
        self.bad_frame_count = 0

    def listen(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        """Bind `endpoint` too. Over tcp:// only the proxy whose key `keys` trusts may connect.

        Raises:
            StartError: the endpoint cannot be bound, or is on the network without keys. The port
                is closed then.
        """
        assert self._guard is None, endpoint
        try:
            check_endpoint(endpoint, keys)
            if keys is not None:  # options apply to later binds
                self._guard = curve_guard(self._context, keys)
                set_options(self._socket, server_options(keys))
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._shut()
            raise StartError(f"{endpoint} cannot be bound: {error.strerror}.") from None
        except StartError:
            self._shut()
            raise
        if endpoint.startswith("ipc://"):
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)

    def post(self, peer: bytes, message: Message) -> None:
        """Queue `message` for `peer` and wake the owner. Any thread; never blocks."""
        self.outbox.append((peer, message))
        if not self._is_woken:
            self.wake()

    def wake(self) -> None:
        """End the owner's wait. Any thread, and signal handlers."""
        self._is_woken = True
        with contextlib.suppress(OSError):  # if full, the owner wakes anyway; if closed, none waits
            self._wake_write.send(b"\0")

    def poll(self, wait_s: float) -> list[tuple[bytes, Message]]:
        """Send the posted messages, wait up to `wait_s` for an event, return received messages."""
        assert wait_s >= 0, wait_s  # zmq waits for ever if it is negative
        self._flush()
        ready = {where for where, _ in self._poller.poll(int(wait_s * 1000))}
        if self._wake_read.fileno() in ready:
            self._wake_read.recv(65536)
        self._is_woken = False  # before the flush, so that later posts wake again
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
        while self.outbox:
            peer, message = self.outbox.popleft()
            if peer in self.gone:  # messages to a lost peer are dropped
                continue
            try:
                self._socket.send_multipart([peer, _frame(message)], zmq.NOBLOCK)
            except zmq.Again:
                log.warning("peer does not read: %d frames wait; it is gone", QUEUE_FRAMES_MAX)
                self.gone.add(peer)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.gone.add(peer)

    def close(self) -> None:
        self._flush()
        self._shut()
        if self._endpoint.startswith("ipc://"):
            Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        self._wake_read.close()
        self._wake_write.close()

    def _shut(self) -> None:
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()


def check_endpoint(endpoint: str, keys: CurveKeys | None) -> None:
    """Raise StartError if `endpoint` is neither ipc:// nor tcp:// with keys."""
    is_private = endpoint.startswith("ipc://")
    if not is_private and not endpoint.startswith("tcp://"):
        raise StartError(f"The endpoint is {endpoint!r}; allowed are ipc://PATH, tcp://HOST:PORT.")
    if not is_private and keys is None:
        raise StartError(f"{endpoint} is on the network and has no CURVE keys. {_MAKE_KEYS}")


def curve_guard(context: "zmq.Context[zmq.Socket[bytes]]", keys: CurveKeys) -> ThreadAuthenticator:
    """Start the authenticator that accepts only the trusted key; libzmq alone accepts any."""
    guard = ThreadAuthenticator(context)
    guard.certs["*"] = {keys.trusted: True}
    guard.start()
    return guard


def _frame(message: Message) -> bytes:
    """Return the frame of `message`; an answer that cannot be encoded is replaced by a Failed.

    Raises:
        WireError: the message cannot be encoded and answers no request.
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
    """The worker does not read its messages, or is gone."""


class _Reader:
    """Passes each frame that arrives on one socket to `take`. Owner: the event loop.

    zmq's descriptor signals a change only once, so all frames are read at once. Any other use of
    the socket may consume the signal and must call `schedule_read` afterwards.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", take: Callable[[bytes], None]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)
        self.schedule_read()

    def schedule_read(self) -> None:
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        left = TAKEN_FRAMES_MAX
        while not self._socket.closed and int(self._socket.get(zmq.EVENTS)) & _READABLE:
            if not left:
                self.schedule_read()
                break
            self._take(self._socket.recv())
            left -= 1

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)


class DealerLink:
    """Connects a proxy to one process of one worker. Owner: the event loop."""

    def __init__(
        self, endpoint: str, take: Callable[[bytes], None], keys: CurveKeys | None = None
    ) -> None:
        """Connect. `take` is called with each frame until `close`, and must raise nothing.

        Raises:
            StartError: the endpoint is on the network, and `keys` is None.
        """
        check_endpoint(endpoint, keys)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        set_options(
            self._socket,
            {
                zmq.LINGER: 0,
                zmq.SNDHWM: QUEUE_FRAMES_MAX,
                zmq.RCVHWM: QUEUE_FRAMES_MAX,
                zmq.MAXMSGSIZE: FRAME_BYTES_MAX,
                zmq.RECONNECT_IVL: 20,
                zmq.RECONNECT_IVL_MAX: 200,
                **client_options(keys),
            },
        )
        self._socket.connect(endpoint)
        self._reader = _Reader(self._socket, take)

    def send(self, message: Message) -> None:
        """Queue `message` without waiting.

        Raises:
            WireError: the message cannot be encoded.
            QueueFull: the worker does not read, or the connection is closed.
        """
        frame = encode(message)
        if self._socket.closed:
            raise QueueFull("the connection to the worker is closed")
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            text = f"the worker's queue is full ({QUEUE_FRAMES_MAX} frames)"
            raise QueueFull(text) from None
        finally:
            self._reader.schedule_read()

    async def disconnected(self) -> None:
        """Return when the connection ends. To be called once.

        zmq reconnects by itself, but the worker does not know the new connection: messages for the
        old one are lost.
        """
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        is_disconnected = asyncio.Event()
        reader = _Reader(monitor, lambda _: is_disconnected.set())
        try:
            await is_disconnected.wait()
        finally:
            self._end_monitor()
            reader.close()
            monitor.close()

    def close(self) -> None:
        self._end_monitor()
        self._reader.close()
        self._socket.close()

    def _end_monitor(self) -> None:
        """Stop zmq's connection events before their reader ends.

        Otherwise zmq's I/O thread, which serves all sockets of the process, waits for ever once the
        unread events have filled their queue.
        """
        if not self._socket.closed:
            self._socket.disable_monitor()

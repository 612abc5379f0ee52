"""Relays bytes between a client and a server unchanged, and notes when they passed."""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

READ_BYTES_MAX: Final = 1 << 16


@dataclass
class Line:
    """One TCP connection. Its two threads append to it; read it when they are done."""

    sent: list[tuple[float, bytes]] = field(default_factory=list)  # by the client
    given: list[tuple[float, bytes]] = field(default_factory=list)  # by the server

    @property
    def silence_s(self) -> float:
        """The longest time that the client waited for the next byte."""
        moments = [(at, False) for at, _ in self.sent] + [(at, True) for at, _ in self.given]
        pairs = pairwise(sorted(moments))
        return max((late - early for (early, _), (late, is_given) in pairs if is_given), default=0)

    @property
    def answer(self) -> bytes:
        return b"".join(data for _, data in self.given)


class Wire:
    """Listens on a port of its own and passes all on to the server; use as a context manager."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[Line] = []

    def __enter__(self) -> "Wire":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()

    @property
    def silence_s(self) -> float:
        """The longest time that any client waited for the next byte."""
        return max((line.silence_s for line in self.lines), default=0)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            line = Line()
            self.lines.append(line)
            threading.Thread(target=self._connect, args=(client, line), daemon=True).start()

    def _connect(self, client: socket.socket, line: Line) -> None:
        """Pass on what one connection brings, until both sides have ended."""
        with client, socket.create_connection(("127.0.0.1", self._server_port)) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            arguments = (client, server, line.sent)
            asking = threading.Thread(target=_pass_on, args=arguments, daemon=True)
            asking.start()
            _pass_on(server, client, line.given)
            asking.join()


def _pass_on(
    source: socket.socket, target: socket.socket, notes: list[tuple[float, bytes]]
) -> None:
    """Copy one direction to its end, and end the other side's with it."""
    with contextlib.suppress(OSError):  # either side may be gone
        while data := source.recv(READ_BYTES_MAX):
            notes.append((time.monotonic(), data))
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)

"""Listens on a port to which nothing may connect, and keeps every byte that comes all the same."""

import socket
import threading
from typing import Any, Final, Self

WAIT_S: Final = 0.2
END_S_MAX: Final = 60.0


class ByteSink:
    """A server that answers nothing; use as a context manager. `seen` has a row a connection."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="byte sink", daemon=True)
        self.port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self._thread.join(END_S_MAX)
        self._listener.close()

    def _run(self) -> None:
        self._listener.settimeout(WAIT_S)
        while not self._is_over.is_set():
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                continue
            with peer:
                peer.settimeout(WAIT_S)
                try:
                    self.seen.append(peer.recv(65_536))
                except OSError:
                    self.seen.append(b"")

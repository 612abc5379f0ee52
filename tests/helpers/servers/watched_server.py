"""Runs Hearth with a scripted model while every socket of all its processes is watched.

An audit hook in each process tells each name that is looked up and each address that is bound,
connected or sent to; beside it the kernel is asked again and again which sockets are open, since
a hook sees nothing of what a library does in C.
"""

import threading
from collections.abc import Iterator
from typing import Any, Final, Self

import psutil

from tests.helpers.servers.scripted_server import ScriptedServer

AUDIT: Final = """
import os, sys
fd = os.open(os.environ["SOCKET_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
def audit(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        told = (event, arguments[0], arguments[1] if len(arguments) > 1 else None)
    elif event in ("socket.connect", "socket.bind", "socket.sendto"):
        address = arguments[1]
        if not isinstance(address, tuple):
            return
        told = (event, address[0], address[1])
    else:
        return
    os.write(fd, (" ".join(map(str, told)) + "\\n").encode())
sys.addaudithook(audit)
"""
WORKER: Final = (
    AUDIT + "from tests.helpers.worker_processes.scripted_worker import main\n"
    "code = main()\nsys.stderr.flush()\nos._exit(code)"
)
LITELLM: Final = AUDIT + "from hearth.proxy.gateway.litellm_main import main\nmain()"
PROXY: Final = (
    AUDIT + "from hearth.proxy.gateway import litellm_process\n"
    f"litellm_process.COMMAND = (sys.executable, '-P', '-c', {LITELLM!r})\n"
    "from hearth.proxy.main import end, main\n"
    f"end(main([sys.executable, '-c', {WORKER!r}]))"
)
LOOK_S: Final = 0.1
LOOPBACK: Final = {"127.0.0.1", "::1", "::ffff:127.0.0.1", "localhost", "None", "", "b''"}


class WatchedServer(ScriptedServer):
    """A scripted server whose sockets are known. `seen` are (address, port) of open ones."""

    def __init__(self, **settings: str) -> None:
        super().__init__(**settings)
        self.socket_log = self.run_dir / "sockets"
        self.environment["SOCKET_LOG"] = str(self.socket_log)
        self.seen: set[tuple[str, int]] = set()
        self.looks = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self, *command: str) -> None:
        super().start(*(command or ("-c", PROXY)))

    def __enter__(self) -> Self:
        super().__enter__()
        self._thread.start()
        return self

    def __exit__(self, *rest: object) -> None:
        self._is_over.set()
        self._thread.join()
        super().__exit__(*rest)

    def told(self) -> list[tuple[str, str, str]]:
        """Return (event, host, port) of all that the processes' hooks have told."""
        rows = (line.split(" ") for line in self.socket_log.read_text().splitlines())
        return [(event, host, port) for event, host, port in rows]

    def strangers(self) -> set[str]:
        """Return each host but loopback that any process looked up, reached or was reached at."""
        hosts = {host for _, host, _ in self.told()} | {host for host, _ in self.seen}
        return hosts - LOOPBACK

    def ports_reached(self) -> set[int]:
        """Return the ports that the processes connected to."""
        return {int(port) for event, _, port in self.told() if event == "socket.connect"}

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.seen |= set(self._open_sockets())
            self.looks += 1

    def _open_sockets(self) -> Iterator[tuple[str, int]]:
        assert self.process is not None
        try:
            proxy = psutil.Process(self.process.pid)
            family = [proxy, *proxy.children(recursive=True)]
        except psutil.Error:
            return
        for process in family:
            for row in _sockets_of(process):
                yield from ((end.ip, end.port) for end in (row.laddr, row.raddr) if end)


def _sockets_of(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections(kind="inet"))
    except psutil.Error:
        return []

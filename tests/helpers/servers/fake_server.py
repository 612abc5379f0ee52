"""Runs the real proxy before scripted workers, and logs what it connects to."""

import json
from collections.abc import Callable
from typing import Any

from tests.helpers.servers.server import Server, until

LAUNCH = """
import os, sys
def audit(event, args):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    if host not in (None, "127.0.0.1", "localhost", "::1"):
        with open(os.environ["AUDIT_LOG"], "a") as file:
            print(event, host, file=file)
sys.addaudithook(audit)
from hearth.proxy.main import end, main
end(main([sys.executable, "-m", "tests.helpers.worker_processes.fake_worker"]))
"""


class FakeServer(Server):
    """The real proxy, with scripted workers, under an audit of what it connects to."""

    def __init__(self, **settings: str) -> None:
        super().__init__(**settings)
        self.worker_log = self.run_dir / "worker.log"
        self.audit_log = self.run_dir / "audit.log"
        self.environment |= {
            "FAKE_WORKER_LOG": str(self.worker_log),
            "AUDIT_LOG": str(self.audit_log),
        }

    def start(self, *command: str) -> None:
        super().start(*(command or ("-c", LAUNCH)))

    def events(self, kind: str, after: float = 0.0) -> list[dict[str, Any]]:
        rows = map(json.loads, self.worker_log.read_text().splitlines())
        return [row for row in rows if row["event"] == kind and row["at"] >= after]

    def until(self, condition: Callable[[], Any]) -> Any:
        return until(condition)

"""Takes JSON that is posted to it, as a tool that a user logs to, and keeps every row."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

END_S_MAX: Final = 60.0


class JsonSink:
    """A logging endpoint; use as a context manager. A posted list is a row for each of it."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        rows = self.rows

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()
                # Last: LiteLLM loses what it is to send before it has read this answer.
                rows.extend(told if isinstance(told, list) else [told])

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._thread.join(END_S_MAX)
        self._server.server_close()

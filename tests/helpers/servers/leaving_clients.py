"""Sends requests of every dialect and closes the connection before the answer has ended."""

import json
import socket
from collections.abc import Callable
from typing import Any

from tests.helpers.servers.server import WAIT_S_MAX, Server

KEY = "a-secret-key"


def _chat(script: str, **fields: Any) -> dict[str, Any]:
    return {"model": "gpt-x", "messages": [{"role": "user", "content": script}], **fields}


BODIES: dict[str, Callable[..., dict[str, Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/messages": lambda script, **rest: _chat(script, max_tokens=5_000, **rest),
    "/v1/responses": lambda script, **rest: {"model": "gpt-x", "input": script, **rest},
}


class Leaving:
    """A client that hangs up."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S_MAX)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\n"
        head += f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n"
        self._socket.sendall(head.encode() + content)

    def read_some(self) -> bytes:
        return self._socket.recv(65_536)

    def read_all(self) -> bytes:
        """Return what else comes until the server closes, and leave."""
        with self._socket, self._socket.makefile("rb") as file:
            return file.read()

    def leave(self) -> None:
        self._socket.close()

"""Sends requests of every dialect and closes the connection before the answer has ended."""

import json
import socket
import time
from collections.abc import Callable
from typing import Any

from tests.helpers.servers.fake_server import FakeServer

KEY = "a-secret-key"


def user(script: str) -> list[Any]:
    return [{"role": "user", "content": script}]


def chat_body(script: str, **fields: Any) -> dict[str, Any]:
    return {"model": "gpt-x", "messages": user(script), **fields}


BODIES: dict[str, Callable[..., dict[str, Any]]] = {
    "/v1/chat/completions": chat_body,
    "/v1/messages": lambda script, **rest: chat_body(script, max_tokens=5_000, **rest),
    "/v1/responses": lambda script, **rest: {"model": "gpt-x", "input": script, **rest},
}


class Leaving:
    """A client that hangs up."""

    def __init__(self, fake: FakeServer, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self._socket = socket.create_connection(("127.0.0.1", fake.port))
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\n"
        head += f"content-length: {len(content)}\r\n\r\n"
        self._socket.sendall(head.encode() + content)

    def read_some(self) -> bytes:
        self._socket.settimeout(5)
        return self._socket.recv(65_536)

    def leave(self) -> float:
        self._socket.close()
        return time.time()

"""Hands an admitted request to LiteLLM's app, and takes the reply back.

LiteLLM is shown a placeholder: it acts on fields such as `mock_response`, `api_base`, `fallbacks`
or `timeout`, scans every message, and reads headers of its own. It gets none of them. What the
answer is made from travels beside it, as the ticket.
"""

import asyncio
import logging
import time
from typing import Any, Final, Protocol

import orjson

from proxy.answer import ClientGone
from proxy.dialects import sse
from proxy.exchange import App, Message, RawHeaders, Scope
from proxy.failures import openai_error
from proxy.request import Ticket, current_ticket
from shared.errors import RequestError

log = logging.getLogger(__name__)

PATHS: Final = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}
_KEPT_HEADERS: Final = frozenset((b"content-type", b"content-length", b"cache-control"))
_STREAM_ERROR: Final = b'data: {"error"'


class Broken(RequestError):
    """LiteLLM answered with an error that is none of ours, or not at all."""

    def __init__(self, text: str) -> None:
        super().__init__(text, status=500, code="internal_error")


class Reply(Protocol):
    """Where LiteLLM's reply goes: an exchange, or the warm-up's sink."""

    async def start(self, status: int, headers: RawHeaders) -> None: ...

    async def body(self, chunk: bytes, *, more: bool) -> None: ...


class Relay:
    """One LiteLLM app, and the token that proves to it that a request came through the edge."""

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._token = token

    async def serve(self, ticket: Ticket, reply: Reply, gone: asyncio.Event) -> None:
        """Let LiteLLM answer `ticket` into `reply`.

        Raises:
            RequestError: nothing was replied, because the answer broke off before it began.
        """
        passage = _Passage(ticket, reply, gone)
        mark = current_ticket.set(ticket)
        pinger = asyncio.create_task(passage.keep_alive(), name="pings")
        try:
            await self._app(self._scope(ticket), passage.receive, passage.send)
        except Exception:
            if not gone.is_set():  # what LiteLLM makes of a client that left is nobody's concern
                raise
        finally:
            pinger.cancel()
            current_ticket.reset(mark)
        if gone.is_set():
            raise ClientGone()
        if passage.status is None or passage.status >= 400:
            raise ticket.failure or Broken(f"LiteLLM answered with status {passage.status}.")

    def _scope(self, ticket: Ticket) -> Scope:
        path = PATHS[ticket.request.dialect]
        body = placeholder(ticket)
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"authorization", b"Bearer " + self._token.encode()),
            ],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
        }


def placeholder(ticket: Ticket) -> bytes:
    """Return the body that LiteLLM sees: as little as its routes accept."""
    body: dict[str, Any] = {
        "model": ticket.model,
        "messages": [{"role": "user", "content": "."}],
        "max_tokens": 1,
        "stream": ticket.request.stream,
    }
    if ticket.request.stream and ticket.request.include_usage:
        body["stream_options"] = {"include_usage": True}
    return orjson.dumps(body)


class _Passage:
    """The receive and send that LiteLLM is given for one request."""

    def __init__(self, ticket: Ticket, reply: Reply, gone: asyncio.Event) -> None:
        self.status: int | None = None
        self._ticket = ticket
        self._reply = reply
        self._gone = gone
        self._body: bytes | None = placeholder(ticket)
        self._needs_pings = ticket.request.stream and ticket.request.dialect == "chat"
        self._is_open = False  # between the reply's start and its end
        self._sent_at = 0.0

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            status: int = message["status"]
            self.status = status
            if status < 400:
                self._is_open, self._sent_at = True, time.monotonic()
                kept = [row for row in message["headers"] if row[0].lower() in _KEPT_HEADERS]
                await self._reply.start(status, kept)
        elif self.status is not None and self.status < 400:
            self._is_open = message.get("more_body", False)
            self._sent_at = time.monotonic()
            await self._reply.body(self._told(message.get("body", b"")), more=self._is_open)

    async def keep_alive(self) -> None:
        """Send a comment whenever a stream of chunks was silent for PING_S: prompts prefill.

        LiteLLM can do this too, with a task for each chunk; Messages have events of their own.
        """
        while self._needs_pings:
            silent_s = time.monotonic() - self._sent_at
            if self._is_open and silent_s >= sse.PING_S:
                self._sent_at = time.monotonic()
                await self._reply.body(b": ping\n\n", more=True)
            else:
                await asyncio.sleep(max(sse.PING_S - silent_s, 0.1) if self._is_open else 0.1)

    def _told(self, chunk: bytes) -> bytes:
        """Return `chunk`, or our words for LiteLLM's about an answer that broke off."""
        failure = self._ticket.failure
        if failure is not None and chunk.startswith(_STREAM_ERROR):
            return sse.data({"error": openai_error(failure)})
        return chunk

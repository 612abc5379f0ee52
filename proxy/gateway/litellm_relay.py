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

from hearth.proxy.api import chat_completions, server_sent_events as sse, usage_extras
from hearth.proxy.api.error_bodies import openai_error
from hearth.proxy.http.http_exchange import App, AsgiMessage, ClientGone, RawHeaders, Scope
from hearth.proxy.request.parsed_request import AdmittedRequest, current_request
from hearth.shared.errors import RequestError

log = logging.getLogger(__name__)

PATHS: Final = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}
_KEPT_HEADERS: Final = frozenset((b"content-type", b"cache-control"))
_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data: "
_DONE: Final = _DATA + b"[DONE]"


class Broken(RequestError):
    """LiteLLM answered with an error that is none of ours, or not at all."""

    def __init__(self, text: str) -> None:
        super().__init__(text, status=500, code="internal_error")


class RelayedReply(Protocol):
    """Where LiteLLM's reply goes: an exchange, or the warm-up's sink."""

    async def start(self, status: int, headers: RawHeaders) -> None: ...

    async def body(self, chunk: bytes, *, more: bool) -> None: ...


class Relay:
    """One LiteLLM app, and the token that proves to it that a request came through the edge."""

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._token = token

    async def serve(
        self, ticket: AdmittedRequest, reply: RelayedReply, gone: asyncio.Event
    ) -> None:
        """Let LiteLLM answer `ticket` into `reply`.

        Raises:
            RequestError: nothing was replied, because the answer broke off before it began.
        """
        passage = _Passage(ticket, reply, gone)
        mark = current_request.set(ticket)
        try:
            await self._app(self._scope(ticket), passage.receive, passage.send)
        except Exception:
            if not gone.is_set():  # what LiteLLM makes of a client that left is nobody's concern
                raise
        finally:
            current_request.reset(mark)
        if gone.is_set():
            raise ClientGone()
        if passage.status is None or passage.status >= 400:
            raise ticket.failure or Broken(f"LiteLLM answered with status {passage.status}.")

    def _scope(self, ticket: AdmittedRequest) -> Scope:
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


def placeholder(ticket: AdmittedRequest) -> bytes:
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

    def __init__(self, ticket: AdmittedRequest, reply: RelayedReply, gone: asyncio.Event) -> None:
        self.status: int | None = None
        self._ticket = ticket
        self._reply = reply
        self._gone = gone
        self._body: bytes | None = placeholder(ticket)
        self._headers: RawHeaders = []
        self._whole: list[bytes] = []  # what there is of an answer that is not streamed
        self._created = int(time.time())
        self._extras: dict[str, Any] = {}  # of a stream's usage, which LiteLLM leaves out

    async def receive(self) -> AsgiMessage:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            status: int = message["status"]
            self.status = status
            self._headers = [row for row in message["headers"] if row[0].lower() in _KEPT_HEADERS]
            if status < 400 and self._ticket.request.stream:
                await self._reply.start(status, self._headers)
        elif self.status is not None and self.status < 400:
            more = message.get("more_body", False)
            chunk = message.get("body", b"")
            if self._ticket.request.stream:
                await self._reply.body(self._told(chunk), more=more)
            else:
                await self._send_whole(chunk, more=more)

    async def _send_whole(self, chunk: bytes, *, more: bool) -> None:
        assert self.status is not None
        self._whole.append(chunk)
        if more:
            return
        body = b"".join(self._whole)
        if self._ticket.request.dialect == "chat":
            body = orjson.dumps(chat_completions.exact_whole(orjson.loads(body)))
        length = (b"content-length", b"%d" % len(body))
        await self._reply.start(self.status, [*self._headers, length])
        await self._reply.body(body, more=False)

    def _told(self, chunk: bytes) -> bytes:
        """Return a part of a stream as the client is to read it.

        Messages are ours as they come. Of chat completions LiteLLM sends one event at a time, or
        several: each is made exact, and our words stand for its own about an answer that broke.
        """
        if self._ticket.request.dialect != "chat":
            return chunk
        return b"".join(map(self._exact, chunk.split(_EVENT_END)))

    def _exact(self, event: bytes) -> bytes:
        if not event:
            return b""
        if not event.startswith(_DATA) or event == _DONE:
            return event + _EVENT_END
        row = orjson.loads(event.removeprefix(_DATA))
        if "choices" in row:
            row = chat_completions.exact_chunk(row, self._created)
            self._extras |= usage_extras.extras_in(row)
            if "usage" in row:
                row["usage"] |= self._extras
            return sse.data(row)
        failure = self._ticket.failure
        return sse.data(row if failure is None else {"error": openai_error(failure)})

"""Speaks HTTP/1.1 with one client: uvicorn's protocol, stricter, with limits, for half-closers too.

uvicorn waits for ever for a head and for a client to read, takes what h11 takes for HTTP, answers
in plain text where it refuses, and closes a connection whose client has only finished sending.
"""

import asyncio
import logging
import math
import re
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from hearth.proxy.http.connection_places import ConnectionPlaces
from hearth.proxy.http.strict_http1 import HEAD_BYTES_MAX, StrictConnection
from hearth.shared.errors import RequestError

log = logging.getLogger(__name__)

CONNECTION: Final = "connection"  # in a scope's state: the Http1Protocol that it came on
WRITE_WAIT_S_MAX: Final = 600.0  # for a client to take anything at all of what is sent to it
HEAD_WAIT_S_MAX: Final = 20.0  # from a connection's start, or a request's first byte, to its body
PROBE_S_MIN: Final = 0.03  # from the end of sending to the question whether a client is there
PROBE_S_MAX: Final = 5.0
JUDGE_S: Final = 0.05  # for a newcomer to show what it is, before one without a key is closed
LINGER_S_MAX: Final = 2.0  # for a refused client to read why, while it still sends
_COMMENT: Final = b": \n\n"  # an event stream's way to say nothing
_AS_ANTHROPIC: Final = re.compile(
    rb"\A\S* +(?:https?://[^/\s]*)?/v1/messages|^anthropic-version[ \t]*:", re.I | re.M
)

# From an error, and whether Anthropic's words are wanted, to the headers and the body of an answer.
Refuse = Callable[[RequestError, bool], tuple[list[tuple[bytes, bytes]], bytes]]


class Http1Protocol(H11Protocol):
    """One connection: its clocks, its place among the others, and its end. Owner: the event loop.

    A head has HEAD_WAIT_S_MAX, and a client that reads nothing WRITE_WAIT_S_MAX; until then it
    holds uvicorn's write buffer and, behind that, what its answer holds. A connection kept alive
    between requests is uvicorn's to close (KEEP_ALIVE_S), or another's to displace.

    TCP tells the end of sending alike of a client that waits for its answer and of one that has
    gone. So whoever ends it amid an answer is sent what HTTP lets a client skip; a machine that
    has no such connection any more replies with a reset, and the next write fails.
    """

    conn: StrictConnection

    def __init__(
        self,
        places: ConnectionPlaces,
        refuse: Refuse,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: self}, _loop)
        self.conn = StrictConnection()
        self.places = places
        self.streams_events = False  # the answer under way is an event stream
        self._refusal = refuse
        # By what they are for. "probe" is there once the client has finished sending, "linger"
        # once it was refused.
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._trusted_cycle: object = None  # the request that was trusted last

    # ------------------------------------------------------------ what the app is told, and tells

    def trust(self) -> None:
        """The request under way came with a good key, or needs none."""
        self._trusted_cycle = self.cycle
        self._note_standing()

    @property
    def takes_parts(self) -> bool:
        """Tell whether the answer under way, of unknown length, is sent in chunks."""
        return self.conn.their_http_version == b"1.1"

    async def send_part(self, content: bytes) -> None:
        """Send a part of the answer under way as uvicorn would, without its checks and h11's.

        They cost a tenth of all that the proxy does for a token.
        """
        assert content, "an empty chunk ends an answer"
        if self.flow.write_paused and not self.cycle.disconnected:
            await self.flow.drain()
        if not self.cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(content), content))

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.places.enter(transport):
            # From the loop's next turn on, in which it reads what these clients have sent already.
            self.loop.call_soon(self.loop.call_later, JUDGE_S, self.places.trim)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if "linger" in self._timers or self.conn.their_state is h11.MUST_CLOSE:
            return  # nothing is read behind what was refused, or was to be the last
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._stop("head")
        self._note_standing()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answer to a whole request; return whether it is kept."""
        is_amid_body = self._is_answering and self.cycle.more_body
        is_amid_head = self.conn.their_state is h11.IDLE and bool(self.conn.unread)
        if "linger" in self._timers:
            return False
        if is_amid_body or is_amid_head:
            part = "body" if is_amid_body else "head"
            text = f"The request ends amid its {part}. Send all of it before you end your side."
            self._refuse(RequestError(text, code="incomplete_request"))
        if is_amid_body or not self._is_answering:
            return False
        if "probe" not in self._timers:
            self._start("probe", PROBE_S_MIN, self._ask_for_client, PROBE_S_MIN)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.leave(self.transport)
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader(math.inf)

    def resume_writing(self) -> None:
        self._stop("write")
        super().resume_writing()

    # ------------------------------------------------------------ uvicorn

    def on_response_complete(self) -> None:
        self.streams_events = False
        super().on_response_complete()  # begins the next request where one waits
        if "probe" in self._timers and (not self._is_answering or self.cycle.more_body):
            self.transport.close()  # no more will come
        self._note_standing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP as it must be; uvicorn calls this where it catches why."""
        self.places.on_closed("malformed")
        fault = sys.exc_info()[1]
        error = RequestError(f"{fault or msg}.", code="malformed_request")
        if getattr(fault, "error_status_hint", 400) == 431 and not self._is_answering:
            error = RequestError(
                f"The request's head is over {HEAD_BYTES_MAX:,} bytes. Send fewer or shorter "
                "headers.",
                status=431,
                code="head_too_large",
            )
        self._refuse(error)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        text = "There are no WebSockets here. Send the request by POST."
        self._refuse(RequestError(text, status=403, code="no_websockets"))

    def _refuse(self, error: RequestError) -> None:
        """Answer with `error` and end the connection, once the client has had time to read it."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # amid an answer: its own end is all that can be said
            return
        is_anthropic = _AS_ANTHROPIC.search(self.conn.unread.head) is not None
        headers, body = self._refusal(error, is_anthropic)
        response = h11.Response(
            status_code=error.status,
            headers=[*headers, (b"connection", b"close")],
            reason=HTTPStatus(error.status).phrase,
        )
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self._is_answering:
            self.cycle.disconnected = True  # its body will not come
            self.cycle.message_event.set()
        self._start("linger", LINGER_S_MAX, self.transport.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    # ------------------------------------------------------------ its place, and its clocks

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _note_standing(self) -> None:
        is_trusted = self.cycle is not None and self._trusted_cycle is self.cycle
        self.places.move(self.transport, is_trusted=is_trusted, is_busy=self._is_answering)

    def _start(self, name: str, wait_s: float, act: Callable[..., None], *args: float) -> None:
        self._timers[name] = self.loop.call_later(wait_s, act, *args)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _await_head(self) -> None:
        """Start the clock, unless it runs: a byte now and then does not set it back."""
        if "head" not in self._timers:
            self._start("head", HEAD_WAIT_S_MAX, self.transport.close)

    def _await_reader(self, unsent_before: float) -> None:
        """Let go of a client that has taken nothing since there were so many bytes for it."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes < unsent_before:
            self._start("write", WRITE_WAIT_S_MAX, self._await_reader, unsent_bytes)
        else:
            log.info("a client has read nothing for %g s: closed", WRITE_WAIT_S_MAX)
            self.transport.abort()

    def _ask_for_client(self, wait_s: float) -> None:
        """Send what a client skips; where there is none any more, the next write fails."""
        if self.transport.is_closing() or not self._is_answering:
            return
        if not self.cycle.response_started:
            if not self.takes_parts:
                self.transport.close()  # HTTP/1.0 has no interim answer: it can not be asked
                return
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(interim))
        elif self.streams_events:
            self.transport.write(self.conn.send(h11.Data(data=_COMMENT)))
        wait_s = min(2 * wait_s, PROBE_S_MAX)
        self._start("probe", wait_s, self._ask_for_client, wait_s)

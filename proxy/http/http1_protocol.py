"""Speaks HTTP/1.1 with one client: uvicorn's protocol, stricter, with limits, for half-closers too.

uvicorn waits for ever for a head and for a client to read, takes what h11 takes for HTTP, answers
in plain text where it refuses, and closes a connection whose client has only finished sending.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from hearth.proxy.http.connection_places import ConnectionPlaces, Standing
from hearth.proxy.http.http_exchange import CONNECTION, RawHeaders
from hearth.proxy.http.strict_http1 import StrictConnection
from hearth.shared.errors import RequestError

log = logging.getLogger(__name__)

WRITE_WAIT_S_MAX: Final = 600.0  # for a client to take anything at all of what is sent to it
HEAD_WAIT_S_MAX: Final = 20.0  # from a connection's start, or a request's first byte, to its body
PROBE_S_MIN: Final = 0.03  # from the end of sending to the question whether a client is there
PROBE_S_MAX: Final = 5.0
JUDGE_S: Final = 0.05  # for a newcomer to show what it is, before one without a key is closed
LINGER_S_MAX: Final = 2.0  # for a refused client to read why, while it still sends
_COMMENT: Final = b": \n\n"  # an event stream's way to say nothing

# From an error, and whether Anthropic's words are wanted, to the headers and the body of an answer.
Refuse = Callable[[RequestError, bool], tuple[RawHeaders, bytes]]


class Http1Protocol(H11Protocol):
    """One connection: its clocks, its place among the others, and its end. Owner: the event loop.

    A head has HEAD_WAIT_S_MAX, and a client that reads nothing WRITE_WAIT_S_MAX; until then it
    holds uvicorn's write buffer and, behind that, what its answer holds. A connection kept alive
    between requests is uvicorn's to close (KEEP_ALIVE_S), or another's to displace.

    TCP tells the end of sending alike of a client that waits for its answer and of one that has
    gone. So whoever ends it amid an answer is sent what HTTP lets a client skip; a machine that
    has no such connection any more replies with a reset, and the next write fails.
    """

    places: ConnectionPlaces
    refuse: Refuse
    conn: StrictConnection

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: self}, _loop)
        self.conn = StrictConnection()
        self.streams_events = False  # the answer under way is an event stream
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None  # set once the client has finished sending
        self._linger: asyncio.TimerHandle | None = None  # set once the connection was refused
        self._trusted_cycle: object = None  # the request that was trusted last

    # ------------------------------------------------------------ what the app is told, and tells

    @property
    def places_max(self) -> int:
        return self.places.count_max

    @property
    def has_place(self) -> bool:
        """Tell whether the request under way may be served."""
        return not self.places.are_taken

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

    def abort(self) -> None:
        self.transport.abort()

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.places.enter(self)
        if self.places.are_short:
            # From the loop's next turn on, in which it reads what these clients have sent already.
            self.loop.call_soon(self.loop.call_later, JUDGE_S, self.places.trim)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._linger is not None:
            return  # refused: nothing behind it is read
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._stop_waiting()
        self._note_standing()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answer to a whole request; return whether it is kept."""
        if self._linger is not None:
            return False
        is_amid_body = self._is_answering and self.cycle.more_body
        if is_amid_body or self.conn.is_amid_head:
            part = "body" if is_amid_body else "head"
            text = f"The request ends amid its {part}. Send all of it before you end your side."
            self._refuse(RequestError(text, code="incomplete_request"))
        if is_amid_body or not self._is_answering:
            return False
        if self._probe is None:
            self._probe_in(PROBE_S_MIN)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.leave(self)
        self._stop_waiting()
        self._stop_write_clock()
        for timer in (self._probe, self._linger):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._stop_write_clock()
        super().resume_writing()

    # ------------------------------------------------------------ uvicorn

    def on_response_complete(self) -> None:
        self.streams_events = False
        super().on_response_complete()  # begins the next request where one waits
        if self._probe is not None and (not self._is_answering or self.cycle.more_body):
            self.transport.close()  # no more will come
        self._note_standing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP as it must be, and read nothing behind it."""
        self.places.on_closed("malformed")
        self._refuse(self.conn.fault or RequestError(msg, code="malformed_request"))

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        text = "There are no WebSockets here. Send the request by POST."
        self._refuse(RequestError(text, status=403, code="no_websockets"))

    def _refuse(self, error: RequestError) -> None:
        """Answer with `error` and end the connection, once the client has had time to read it."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # amid an answer: its own end is all that can be said
            return
        headers, body = self.refuse(error, self.conn.is_anthropic)
        headers = [*headers, (b"connection", b"close")]
        for event in (
            h11.Response(
                status_code=error.status,
                headers=headers,
                reason=HTTPStatus(error.status).phrase.encode(),
            ),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its body will not come
            self.cycle.message_event.set()
        self._linger = self.loop.call_later(LINGER_S_MAX, self.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    # ------------------------------------------------------------ its place

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _standing(self) -> Standing:
        if self.cycle is not None and self._trusted_cycle is self.cycle:
            return Standing.BUSY_TRUSTED if self._is_answering else Standing.IDLE_TRUSTED
        return Standing.BUSY_STRANGER if self._is_answering else Standing.IDLE_STRANGER

    def _note_standing(self) -> None:
        self.places.move(self, self._standing)

    # ------------------------------------------------------------ whether the client is there

    def _probe_in(self, wait_s: float) -> None:
        self._probe = self.loop.call_later(wait_s, self._ask_for_client, wait_s)

    def _ask_for_client(self, wait_s: float) -> None:
        """Send what a client skips; where there is none any more, the next write fails."""
        if self.transport.is_closing() or not self._is_answering:
            return
        if not self.cycle.response_started:
            if self.conn.their_http_version == b"1.0":
                self.transport.close()  # HTTP/1.0 has no interim answer: it can not be asked
                return
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(interim))
        elif self.streams_events:
            self.transport.write(self.conn.send(h11.Data(data=_COMMENT)))
        self._probe_in(min(2 * wait_s, PROBE_S_MAX))

    # ------------------------------------------------------------ clocks

    def _await_reader(self) -> None:
        self._stop_write_clock()
        unsent_bytes = self.transport.get_write_buffer_size()
        self._write_deadline = self.loop.call_later(
            WRITE_WAIT_S_MAX, self._check_reader, unsent_bytes
        )

    def _check_reader(self, unsent_bytes: int) -> None:
        """Let go of a client that has taken nothing since there were so many bytes for it."""
        if self.transport.get_write_buffer_size() < unsent_bytes:
            self._await_reader()
        else:
            log.info("a client has read nothing for %g s: closed", WRITE_WAIT_S_MAX)
            self.transport.abort()

    def _stop_write_clock(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _await_head(self) -> None:
        """Start the clock, unless it runs: a byte now and then does not set it back."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_WAIT_S_MAX, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def protocol_of(places: ConnectionPlaces, refuse: Refuse) -> type[Http1Protocol]:
    """Return the protocol of a server whose connections share `places`."""
    shared = {"places": places, "refuse": staticmethod(refuse)}
    return type("ListeningProtocol", (Http1Protocol,), shared)

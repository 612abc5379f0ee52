"""Speaks HTTP/1.1 with clients: uvicorn's protocol with limits, strict parsing and half-close.

uvicorn waits for ever for a request's head and for a client to read, accepts whatever h11 accepts,
refuses in plain text, and closes a connection whose client has only finished sending.

h11 accepts bare line feeds, folded lines, control bytes, Content-Length beside Transfer-Encoding
and repeated equal lengths, and has no setting against them. If a proxy in front reads any of these
differently, a client can smuggle one request inside another. So h11 gets only bytes that follow
RFC 9112 strictly.
"""

import asyncio
import logging
import math
import re
import sys
from asyncio import Transport
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Literal

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from hearth.shared.errors import RequestError

log = logging.getLogger(__name__)

CONNECTION: Final = "connection"  # key in a scope's state of the connection's Http1Protocol
WRITE_WAIT_S_MAX: Final = 600.0  # time for a client to read at least one byte
HEAD_WAIT_S_MAX: Final = 20.0  # time for a head after the connection's start or the first byte
PROBE_S_MIN: Final = 0.03  # time from the client's end of sending to the first probe
PROBE_S_MAX: Final = 5.0
JUDGE_S: Final = 0.05  # time for a new connection to send its key, before connections are closed
LINGER_S_MAX: Final = 2.0  # time for a refused client that still sends to read the refusal
_COMMENT: Final = b": \n\n"  # an empty comment of an event stream
_AS_ANTHROPIC: Final = re.compile(
    rb"\A\S* +(?:https?://[^/\s]*)?/v1/messages|^anthropic-version[ \t]*:", re.I | re.M
)

CloseReason = Literal["displaced", "malformed"]  # why a connection was closed
# Maps an error, and whether the client speaks Anthropic's API, to headers and body of a reply.
Refuse = Callable[[RequestError, bool], tuple[list[tuple[bytes, bytes]], bytes]]

# ------------------------------------------------------------ the slots of all connections

CONNECTIONS_MAX: Final = 1_000  # BodyBudget limits the memory of their bodies
OVERSHOOT: Final = 2  # connections that may be open before a trim, per slot
FILES_A_CONNECTION: Final = 2  # the connection itself, and one for fetching an image
FILES_SPARE: Final = 128  # for the workers' sockets, journals and the log


class ConnectionSlots:
    """Keeps all open connections, and chooses which to close. Owner: the event loop.

    Idle connections without an accepted key are closed first, then busy ones without a key, then
    idle ones with a key; within a class, the longest unchanged one. New connections get JUDGE_S
    to send their key, so for a moment there may be OVERSHOOT times `count_max` connections.
    Invariant: after each `trim` there are at most `count_max`, or one more if `count_max` are busy
    with a key; requests on the extra connection are refused (`are_full`).
    """

    def __init__(self, count_max: int = CONNECTIONS_MAX) -> None:
        assert count_max > 0, count_max
        self.count_max = count_max
        self.on_closed: Callable[[CloseReason], None] = lambda why: None
        # (is trusted, is busy) of each connection, the longest unchanged first. Trusted: its last
        # request came with an accepted key, or needed none.
        self._standings: dict[Transport, tuple[bool, bool]] = {}
        self._is_to_be_trimmed = False  # a trim is planned; later connections do not postpone it

    def __len__(self) -> int:
        return len(self._standings)

    @property
    def are_full(self) -> bool:
        """Return whether every slot has a busy connection with an accepted key."""
        taken = len(self) >= self.count_max and sum(map(all, self._standings.values()))
        return taken >= self.count_max

    def enter(self, newcomer: Transport) -> bool:
        """Add `newcomer`; return whether the caller has to call `trim` after JUDGE_S."""
        if len(self) >= OVERSHOOT * self.count_max:  # closes several at once: each search is O(n)
            self._close(max(1, self.count_max // 10))
        self._standings[newcomer] = (False, False)
        was_asked = self._is_to_be_trimmed
        self._is_to_be_trimmed |= len(self) > self.count_max
        return self._is_to_be_trimmed > was_asked

    def trim(self) -> None:
        """Close connections beyond `count_max`, but no busy trusted one, nor the last closable."""
        self._is_to_be_trimmed = False
        self._close(len(self) - self.count_max)

    def _close(self, count: int) -> None:
        closable = [
            transport for transport, standing in self._standings.items() if not all(standing)
        ]
        closable.sort(key=self._standings.__getitem__)
        for transport in closable[: max(0, min(count, len(closable) - 1))]:
            self.on_closed("displaced")
            self.leave(transport)
            transport.abort()

    def update(self, connection: Transport, *, is_trusted: bool, is_busy: bool) -> None:
        """Record the new standing of `connection`; one that has left is ignored."""
        standing = (is_trusted, is_busy)
        if self._standings.get(connection, standing) != standing:
            del self._standings[connection]
            self._standings[connection] = standing

    def leave(self, connection: Transport) -> None:
        self._standings.pop(connection, None)


def slots_within(open_files_max: int) -> int:
    """Return how many connections a process can serve with `open_files_max` open files."""
    return max(1, min(CONNECTIONS_MAX, (open_files_max - FILES_SPARE) // FILES_A_CONNECTION))


# ------------------------------------------------------------ strict parsing before h11

HEAD_BYTES_MAX: Final = 64 * 1024
# Each chunk costs some 35 us of the event loop, however small it is.
SMALL_CHUNKS_MAX: Final = 1_000
CHUNK_BYTES: Final = 64  # the least average size, once there are more chunks
CHUNK_LINE_BYTES_MAX: Final = 256  # a chunk's size and extensions; extensions are ignored
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_TEXT: Final = rb"[\t\x20-\x7e\x80-\xff]*"
_REQUEST_LINE: Final = re.compile(rb"%b /[\x21-\x7e]* HTTP/1\.([01])\r\n" % _TOKEN)
_FIELDS: Final = re.compile(rb"(?:%b:%b\r\n)*" % (_TOKEN, _TEXT))
_END: Final = re.compile(rb"(?:\A|\n)\r?\n")  # the end of a head or of trailers, as h11 finds it
_LENGTHS: Final = re.compile(rb"^(?:content-length|transfer-encoding):.*(?=\r)", re.I | re.M)
_LENGTH: Final = rb"content-length:[ \t]*[0-9]{1,18}[ \t]*"
_CODING: Final = rb"transfer-encoding:[ \t]*chunked[ \t]*"
_LENGTH_FORMS: Final = {  # the header with a body's length, by the version's last digit
    b"0": re.compile(_LENGTH, re.I),
    b"1": re.compile(rb"%b|%b" % (_LENGTH, _CODING), re.I),
}
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;%b)?\r\n" % _TEXT)


class StrictConnection(h11.Connection):
    """A server's h11 connection that reads its lines through `StrictBuffer`.

    h11 splits heads and chunks in a private buffer. Replacing that buffer lets each line be checked
    where h11 finds it, without a second search.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES_MAX)
        self._receive_buffer = self.unread = StrictBuffer()


class StrictBuffer(ReceiveBuffer):
    """Buffers received bytes for h11, and raises at a malformed line.

    h11 turns its exceptions into h11.RemoteProtocolError. Owner: the event loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = b""  # head of the last request, as far as received
        self._is_amid_trailers = False
        self._looked_at = 0  # bytes of an incomplete head or trailers that were searched
        self._chunks = self._chunk_bytes = 0  # chunks of the present body, and their bytes

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the line of a chunk's size; None if it is incomplete."""
        line = super().maybe_extract_next_line()
        if len(self if line is None else line) > CHUNK_LINE_BYTES_MAX:
            raise h11.LocalProtocolError(
                f"A chunk's size and extensions are over {CHUNK_LINE_BYTES_MAX} bytes"
            )
        if line is not None:
            if (found := _CHUNK_LINE.fullmatch(line)) is None:
                raise h11.LocalProtocolError(
                    f"A chunk's size is {_shown(line)}; it must be hex digits"
                )
            size = int(found[1], 16)
            self._is_amid_trailers = not size
            self._chunks, self._chunk_bytes = self._chunks + 1, self._chunk_bytes + size
            if self._chunks > SMALL_CHUNKS_MAX and self._chunk_bytes < self._chunks * CHUNK_BYTES:
                raise h11.LocalProtocolError(
                    f"The body came in {self._chunks:,} chunks of less than {CHUNK_BYTES} bytes on "
                    "average; it must be sent in larger ones"
                )
        return line

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of a head, or of a body's trailers; None if they are incomplete."""
        unread, start = bytes(self), self._looked_at  # each byte is searched once
        end = _END.search(unread, max(0, start - 2), HEAD_BYTES_MAX)  # h11 refuses more bytes
        self._looked_at = 0 if end else len(unread)
        if self._is_amid_trailers:
            if end is not None:
                self._is_amid_trailers = False
                _check_fields(unread[: end.end()])
        else:
            self._chunks = self._chunk_bytes = 0
            self.head = unread[: end.end() if end else HEAD_BYTES_MAX]
            if self.head.find(b"\n", start) >= 0:
                _check_head(self.head, is_whole=end is not None)
        return super().maybe_extract_lines() if end else None


def _check_head(head: bytes, *, is_whole: bool) -> None:
    """Check the lines of a head, and that exactly one header, or none, gives the body's length.

    Raises:
        h11.LocalProtocolError: some parsers would read a different request.
    """
    if (line := _REQUEST_LINE.match(head)) is None:
        raise h11.LocalProtocolError(
            f"The request begins with {_shown(head[:80])}; it must begin with a method, a path "
            "that starts with '/', HTTP/1.1 or HTTP/1.0, and CR LF"
        )
    if not is_whole:
        return
    _check_fields(head[line.end() :])
    lengths = _LENGTHS.findall(head)
    if len(lengths) > 1 or any(not _LENGTH_FORMS[line[1]].fullmatch(header) for header in lengths):
        raise h11.LocalProtocolError(
            f"The body's length is told by {_shown(b'; '.join(lengths))}; it must be one "
            "Content-Length of digits or, in HTTP/1.1, one 'Transfer-Encoding: chunked'"
        )


def _check_fields(lines: bytes) -> None:
    """Check header lines and the empty line after them. Raises: h11.LocalProtocolError."""
    fields = _FIELDS.match(lines)
    assert fields is not None, "it matches nothing too"
    line, _, behind = lines[fields.end() :].partition(b"\n")
    if line == b"\r" and not behind:
        return
    if line[:1] in (b" ", b"\t") or not line.endswith(b"\r"):
        raise h11.LocalProtocolError(
            "A line ends in LF alone, or goes on in a second one; end each in CR LF"
        )
    name = line.partition(b":")[0]  # without the value, which may be a key
    raise h11.LocalProtocolError(
        f"The header {_shown(name)} must be a name, ':' and a value of no control bytes"
    )


def _shown(text: bytes | bytearray) -> str:
    return f"{text.decode('latin-1')!r:.100}"


# ------------------------------------------------------------ a connection


class Http1Protocol(H11Protocol):
    """One connection: its timeouts, its slot, and its end. Owner: the event loop.

    A head must arrive within HEAD_WAIT_S_MAX, and a client may stop reading for WRITE_WAIT_S_MAX;
    meanwhile uvicorn's write buffer and the buffered answer stay in memory. An idle kept-alive
    connection is closed by uvicorn (KEEP_ALIVE_S), or to make room for another.

    A client that half-closes and waits for its answer looks in TCP like a client that has gone. So
    after a half-close the server sends bytes that HTTP lets a client skip. If the client has gone,
    its machine replies with a reset, and the next write fails.
    """

    conn: StrictConnection

    def __init__(
        self,
        slots: ConnectionSlots,
        refuse: Refuse,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: self}, _loop)
        self.conn = StrictConnection()
        self.slots = slots
        self.streams_events = False  # the answer under way is an event stream
        self._make_refusal = refuse
        # By purpose: "head", "write", "probe" after a half-close, "linger" after a refusal.
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._trusted_cycle: object = None  # the last trusted request

    # ------------------------------------------------------------ for the app

    def trust(self) -> None:
        """Record that the present request came with an accepted key, or needs none."""
        self._trusted_cycle = self.cycle
        self._update_standing()

    @property
    def takes_parts(self) -> bool:
        """Return whether an answer of unknown length can be sent in chunks."""
        return self.conn.their_http_version == b"1.1"

    async def send_part(self, content: bytes) -> None:
        """Send a chunk of the present answer as uvicorn would, without its and h11's checks.

        Those checks cost a tenth of the proxy's time for a token.
        """
        assert content, "an empty chunk ends an answer"
        if self.flow.write_paused and not self.cycle.disconnected:
            await self.flow.drain()
        if not self.cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(content), content))

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.slots.enter(transport):
            # The delay begins in the loop's next iteration, which reads what clients have sent.
            self.loop.call_soon(self.loop.call_later, JUDGE_S, self.slots.trim)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if "linger" in self._timers or self.conn.their_state is h11.MUST_CLOSE:
            return  # nothing is read after a refusal, or after the last request
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._stop("head")
        self._update_standing()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the client's half-close; return whether the connection stays for an answer."""
        is_amid_body = self._is_answering and self.cycle.more_body
        is_amid_head = self.conn.their_state is h11.IDLE and bool(self.conn.unread)
        if "linger" in self._timers:
            return False
        if is_amid_body or is_amid_head:
            self._refuse(
                RequestError(
                    f"The request ends amid its {'body' if is_amid_body else 'head'}. Send all of "
                    "it before you end your side.",
                    code="incomplete_request",
                )
            )
        if is_amid_body or not self._is_answering:
            return False
        if "probe" not in self._timers:
            self._start("probe", PROBE_S_MIN, self._probe_client, PROBE_S_MIN)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.slots.leave(self.transport)
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_reader(math.inf)

    def resume_writing(self) -> None:
        self._stop("write")
        super().resume_writing()

    # ------------------------------------------------------------ uvicorn

    def on_response_complete(self) -> None:
        self.streams_events = False
        super().on_response_complete()  # begins the next request if one waits
        if "probe" in self._timers and (not self._is_answering or self.cycle.more_body):
            self.transport.close()  # no further request can come
        self._update_standing()

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP; uvicorn calls this while it handles h11's exception."""
        self.slots.on_closed("malformed")
        fault = sys.exc_info()[1]
        if getattr(fault, "error_status_hint", 400) == 431 and not self._is_answering:
            self._refuse(
                RequestError(
                    f"The request's head is over {HEAD_BYTES_MAX:,} bytes. Send fewer or shorter "
                    "headers.",
                    status=431,
                    code="head_too_large",
                )
            )
        else:
            self._refuse(RequestError(f"{fault or msg}.", code="malformed_request"))

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._refuse(
            RequestError(
                "There are no WebSockets here. Send the request by POST.",
                status=403,
                code="no_websockets",
            )
        )

    def _refuse(self, error: RequestError) -> None:
        """Answer with `error`, and close the connection once the client could read the answer."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun, so no error can be sent
            return
        is_anthropic = _AS_ANTHROPIC.search(self.conn.unread.head) is not None
        headers, body = self._make_refusal(error, is_anthropic)
        response = h11.Response(
            status_code=error.status,
            headers=[*headers, (b"connection", b"close")],
            reason=HTTPStatus(error.status).phrase,
        )
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self._is_answering:
            self.cycle.disconnected = True  # the rest of the request's body will not be read
            self.cycle.message_event.set()
        self._start("linger", LINGER_S_MAX, self.transport.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    # ------------------------------------------------------------ slot and timers

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _update_standing(self) -> None:
        is_trusted = self.cycle is not None and self._trusted_cycle is self.cycle
        self.slots.update(self.transport, is_trusted=is_trusted, is_busy=self._is_answering)

    def _start(self, name: str, wait_s: float, act: Callable[..., None], *args: float) -> None:
        self._timers[name] = self.loop.call_later(wait_s, act, *args)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _await_head(self) -> None:
        """Start the head's timer unless it runs; slow bytes do not restart it."""
        if "head" not in self._timers:
            self._start("head", HEAD_WAIT_S_MAX, self.transport.close)

    def _check_reader(self, unsent_before: float) -> None:
        """Close the connection if the client has read none of the `unsent_before` bytes."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes < unsent_before:
            self._start("write", WRITE_WAIT_S_MAX, self._check_reader, unsent_bytes)
        else:
            log.info("a client has read nothing for %g s: closed", WRITE_WAIT_S_MAX)
            self.transport.abort()

    def _probe_client(self, wait_s: float) -> None:
        """Send bytes that a client skips; if the client has gone, the next write fails."""
        if self.transport.is_closing() or not self._is_answering:
            return
        if not self.cycle.response_started:
            if not self.takes_parts:
                self.transport.close()  # HTTP/1.0 has no interim response to probe with
                return
            self.transport.write(
                self.conn.send(
                    h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
                )
            )
        elif self.streams_events:
            self.transport.write(self.conn.send(h11.Data(data=_COMMENT)))
        wait_s = min(2 * wait_s, PROBE_S_MAX)
        self._start("probe", wait_s, self._probe_client, wait_s)

"""Speaks HTTP/1.1 with clients: uvicorn's protocol, stricter, with limits, for half-closers too.

uvicorn waits for ever for a head and for a client to read, takes what h11 takes for HTTP, answers
in plain text where it refuses, and closes a connection whose client has only finished sending.

h11 takes bare line feeds, folded lines, control bytes, a length beside a coding and several equal
lengths, and has no setting against them. A proxy in front that reads any of these otherwise would
let a client hide one request in another. So h11 is shown only HTTP/1.1 as RFC 9112 writes it.
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

Why = Literal["displaced", "malformed"]  # why a connection was closed
# From an error, and whether Anthropic's words are wanted, to the headers and the body of an answer.
Refuse = Callable[[RequestError, bool], tuple[list[tuple[bytes, bytes]], bytes]]

# ------------------------------------------------------------ the places of all connections

CONNECTIONS_MAX: Final = 1_000  # what their bodies take together is BodyBudget's
OVERSHOOT: Final = 2  # times the places, for as long as newcomers are not judged
FILES_A_CONNECTION: Final = 2  # its own, and one that an image is fetched by
FILES_SPARE: Final = 128  # the workers' sockets, journals, the log


class ConnectionPlaces:
    """All open connections, and which of them goes first. Owner: the event loop.

    The order is: without a good key and idle, without one amid a request, idle with one; of those
    alike the one that is so longest. A newcomer is not judged before what it sends could be read:
    for a moment there may be OVERSHOOT times `count_max`. Invariant: behind each `trim` there are
    `count_max`, or one more where that many are amid requests with a key: it is told `are_taken`.
    """

    def __init__(self, count_max: int = CONNECTIONS_MAX) -> None:
        assert count_max > 0, count_max
        self.count_max = count_max
        self.on_closed: Callable[[Why], None] = lambda why: None
        # Each one's (is trusted, is busy), the longest so first. Trusted: its last request came
        # with a good key, or needed none.
        self._standings: dict[Transport, tuple[bool, bool]] = {}
        self._is_to_be_trimmed = False  # in a flood each newcomer still has its time to be read

    def __len__(self) -> int:
        return len(self._standings)

    @property
    def are_taken(self) -> bool:
        """Tell whether there is no place that a newcomer may have."""
        taken = len(self) >= self.count_max and sum(map(all, self._standings.values()))
        return taken >= self.count_max

    def enter(self, newcomer: Transport) -> bool:
        """Take `newcomer` in; return whether `trim` is to be called once it has shown itself."""
        if len(self) >= OVERSHOOT * self.count_max:  # some at once: to seek one takes as long
            self._close(max(1, self.count_max // 10))
        self._standings[newcomer] = (False, False)
        was_asked = self._is_to_be_trimmed
        self._is_to_be_trimmed |= len(self) > self.count_max
        return self._is_to_be_trimmed > was_asked

    def trim(self) -> None:
        """Close what there is no place for, but none amid a trusted request, nor the last left."""
        self._is_to_be_trimmed = False
        self._close(len(self) - self.count_max)

    def _close(self, count: int) -> None:
        closable = [each for each, standing in self._standings.items() if not all(standing)]
        closable.sort(key=self._standings.__getitem__)
        for each in closable[: max(0, min(count, len(closable) - 1))]:
            self.on_closed("displaced")
            self.leave(each)
            each.abort()

    def move(self, connection: Transport, *, is_trusted: bool, is_busy: bool) -> None:
        """Note what `connection` is at now; of one that has left, nothing."""
        standing = (is_trusted, is_busy)
        if self._standings.get(connection, standing) != standing:
            del self._standings[connection]
            self._standings[connection] = standing

    def leave(self, connection: Transport) -> None:
        self._standings.pop(connection, None)


def places_within(open_files_max: int) -> int:
    """Return how many connections a process may serve that may have so many files open."""
    return max(1, min(CONNECTIONS_MAX, (open_files_max - FILES_SPARE) // FILES_A_CONNECTION))


# ------------------------------------------------------------ what h11 is shown

HEAD_BYTES_MAX: Final = 64 * 1024
# A chunk costs some 35 us of the event loop, however small it is.
SMALL_CHUNKS_MAX: Final = 1_000
CHUNK_BYTES: Final = 64  # on average, of more
CHUNK_LINE_BYTES_MAX: Final = 256  # a chunk's size and its extensions, which nobody reads
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_TEXT: Final = rb"[\t\x20-\x7e\x80-\xff]*"
_REQUEST_LINE: Final = re.compile(rb"%b /[\x21-\x7e]* HTTP/1\.([01])\r\n" % _TOKEN)
_FIELDS: Final = re.compile(rb"(?:%b:%b\r\n)*" % (_TOKEN, _TEXT))
_END: Final = re.compile(rb"(?:\A|\n)\r?\n")  # of a head or of trailers, as h11 finds it
_LENGTHS: Final = re.compile(rb"^(?:content-length|transfer-encoding):.*(?=\r)", re.I | re.M)
_LENGTH: Final = rb"content-length:[ \t]*[0-9]{1,18}[ \t]*"
_CODING: Final = rb"transfer-encoding:[ \t]*chunked[ \t]*"
_TOLD: Final = {  # by the last digit of the version: how one request may tell its body's length
    b"0": re.compile(_LENGTH, re.I),
    b"1": re.compile(rb"%b|%b" % (_LENGTH, _CODING), re.I),
}
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;%b)?\r\n" % _TEXT)


class StrictConnection(h11.Connection):
    """A server's h11 connection that reads its lines through `StrictBuffer`.

    h11 finds where a head, a chunk and a body end, in a buffer of its own that nothing public
    reaches; it is replaced, so that each line is checked once and none is looked for twice.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES_MAX)
        self._receive_buffer = self.unread = StrictBuffer()


class StrictBuffer(ReceiveBuffer):
    """What came and h11 has not read; it gives out no line that is not as it must be.

    What it raises h11 turns into an h11.RemoteProtocolError. Owner: the event loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = b""  # of the last request, as far as it has come
        self._is_amid_trailers = False
        self._looked_at = 0  # bytes of a head or of trailers that are not whole
        self._chunks = self._chunk_bytes = 0  # of the body

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the line of a chunk's size; None where it is not whole."""
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
        """Return the lines of a head, or of a body's trailers; None where they are not whole."""
        unread, start = bytes(self), self._looked_at  # each byte once, however slowly it comes
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
    """Check the lines of a head, and that it tells in one way where its body ends.

    Raises:
        h11.LocalProtocolError: some readers would read another request.
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
    if len(lengths) > 1 or any(not _TOLD[line[1]].fullmatch(each) for each in lengths):
        raise h11.LocalProtocolError(
            f"The body's length is told by {_shown(b'; '.join(lengths))}; it must be one "
            "Content-Length of digits or, in HTTP/1.1, one 'Transfer-Encoding: chunked'"
        )


def _check_fields(lines: bytes) -> None:
    """Check header lines and the empty one behind them. Raises: h11.LocalProtocolError."""
    fields = _FIELDS.match(lines)
    assert fields is not None, "it matches nothing too"
    line, _, behind = lines[fields.end() :].partition(b"\n")
    if line == b"\r" and not behind:
        return
    if line[:1] in (b" ", b"\t") or not line.endswith(b"\r"):
        raise h11.LocalProtocolError(
            "A line ends in LF alone, or goes on in a second one; end each in CR LF"
        )
    name = line.partition(b":")[0]  # its value may be a key
    raise h11.LocalProtocolError(
        f"The header {_shown(name)} must be a name, ':' and a value of no control bytes"
    )


def _shown(text: bytes | bytearray) -> str:
    return f"{text.decode('latin-1')!r:.100}"


# ------------------------------------------------------------ a connection


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
            self.transport.write(
                self.conn.send(
                    h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
                )
            )
        elif self.streams_events:
            self.transport.write(self.conn.send(h11.Data(data=_COMMENT)))
        wait_s = min(2 * wait_s, PROBE_S_MAX)
        self._start("probe", wait_s, self._ask_for_client, wait_s)

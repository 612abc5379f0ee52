"""Reads HTTP/1.1 as strictly as RFC 9112 is written, and refuses what can be read in two ways.

h11 takes bare line feeds, folded headers, a length beside a coding and several equal lengths. A
proxy in front that reads any of these otherwise would let a client hide one request in another.
"""

import re
from typing import Final

import h11

from hearth.shared.errors import RequestError

HEAD_BYTES_MAX: Final = 64 * 1024
CHUNK_LINE_BYTES_MAX: Final = 256  # a chunk's size and its extensions, which nobody reads
TRAILER_BYTES_MAX: Final = 8 * 1024
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE: Final = re.compile(rb"%b /[\x21-\x7e]* HTTP/1\.[01]" % _TOKEN)
_FIELD: Final = re.compile(rb"(%b):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*" % _TOKEN)
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_BARE_LF: Final = re.compile(rb"(?<!\r)\n")
_AS_ANTHROPIC: Final = re.compile(
    rb"\A\S* +(?:https?://[^/\s]*)?/v1/messages|^anthropic-version[ \t]*:", re.I | re.M
)


class StrictConnection(h11.Connection):
    """A server's h11 connection that is given only what was understood here.

    Invariant: h11's own buffer is empty, or the rest of one whole head or piece of a body; all
    else waits in `_unread`. Owner: the event loop.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES_MAX)
        self.fault: RequestError | None = None  # why nothing is read any more
        self.is_anthropic = False  # what the answer to the last head is to look like
        self._unread = bytearray()
        self._looked_at = 0  # bytes of a head that is not whole
        self._has_line = False  # its first line was checked
        self._left = 0  # bytes of a body whose length was told
        self._chunks: _ChunkedBody | None = None

    @property
    def is_amid_head(self) -> bool:
        """Whether a head has begun to come."""
        return self.their_state is h11.IDLE and bool(self._unread)

    def receive_data(self, data: bytes) -> None:
        self._unread += data

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return h11's next event.

        Raises:
            h11.RemoteProtocolError: this is not HTTP as it must be; `fault` tells the client why.
        """
        if self.fault is not None:
            raise h11.RemoteProtocolError(str(self.fault))
        try:
            event = super().next_event()
            while event is h11.NEED_DATA and self._unread:
                if self.their_state not in (h11.IDLE, h11.SEND_BODY):
                    return h11.PAUSED  # what came waits for the end of this exchange
                if not (piece := self._next_piece()):
                    break
                super().receive_data(piece)
                event = super().next_event()
        except RequestError as fault:
            self.fault = fault
            raise h11.RemoteProtocolError(str(fault)) from None
        except h11.RemoteProtocolError as error:
            self.fault = _fault(f"{error}")
            raise
        return event

    def _next_piece(self) -> bytes:
        """Take what is understood from the front of `_unread`; nothing where more must come."""
        if self.their_state is h11.IDLE:
            return self._head()
        if self._chunks is not None:
            return self._chunks.take(self._unread)
        piece = bytes(self._unread[: self._left])
        del self._unread[: len(piece)]
        self._left -= len(piece)
        return piece

    def _head(self) -> bytes:
        end = self._unread.find(b"\r\n\r\n", max(0, self._looked_at - 3), HEAD_BYTES_MAX)
        if end < 0:
            self._check_part()
            return b""
        head = bytes(self._unread[: end + 4])
        self.is_anthropic = _AS_ANTHROPIC.search(head) is not None
        first, *rows = head[:end].split(b"\r\n")
        _check_request_line(first)
        self._frame(first.endswith(b"1.1"), [_field(row) for row in rows])
        del self._unread[: len(head)]
        self._looked_at, self._has_line = 0, False
        return head

    def _check_part(self) -> None:
        """Refuse a head that is not whole where no more bytes can make it a good one."""
        unread = self._unread
        if not self._has_line and (end := unread.find(b"\n", 0, HEAD_BYTES_MAX)) >= 0:
            self.is_anthropic = _AS_ANTHROPIC.search(unread) is not None
            _check_line_end(unread, end)
            _check_request_line(bytes(unread[: end - 1]))
            self._has_line = True
        if unread[0] < 0x21:
            raise _fault("A request begins with its method; this one begins with a control byte")
        if _BARE_LF.search(unread, max(0, self._looked_at - 1)):
            raise _fault("A line ends in LF alone; lines end in CR LF")
        if len(unread) >= HEAD_BYTES_MAX:
            raise RequestError(
                f"The request's head is over {HEAD_BYTES_MAX:,} bytes. Send fewer or shorter "
                "headers.",
                status=431,
                code="head_too_large",
            )
        self._looked_at = len(unread)

    def _frame(self, is_1_1: bool, fields: list[tuple[bytes, bytes]]) -> None:
        """Note where the body will end.

        Raises:
            RequestError: the head tells it in two ways, or in none that all would read alike.
        """
        hosts = [value for name, value in fields if name == b"host"]
        lengths = [value for name, value in fields if name == b"content-length"]
        codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
        if len(hosts) > 1 or (is_1_1 and not hosts):
            raise _fault(f"The request has {len(hosts)} Host headers; it must have one")
        if lengths and codings:
            raise _fault("The request has a Content-Length and a Transfer-Encoding; send one")
        if len(lengths) > 1 or any(not _LENGTH.fullmatch(length) for length in lengths):
            shown = b", ".join(lengths).decode("latin-1")
            raise _fault(f"The Content-Length is {shown!r:.60}; it must be one number")
        if codings and (codings != [b"chunked"] or not is_1_1):
            shown = b", ".join(codings).decode("latin-1")
            raise _fault(
                f"The Transfer-Encoding is {shown!r:.60}; in HTTP/1.1 it may be 'chunked' alone, "
                "in HTTP/1.0 there is none"
            )
        self._chunks = _ChunkedBody() if codings else None
        self._left = int(lengths[0]) if lengths else 0


class _ChunkedBody:
    """Takes a chunked body apart and writes it anew, without extensions and trailers."""

    def __init__(self) -> None:
        self._left = 0  # bytes of the chunk that is being read
        self._ends_chunk = False  # its line end must come
        self._trailer_bytes: int | None = None  # None before the last chunk
        self._is_over = False

    def take(self, unread: bytearray) -> bytes:
        """Remove what is understood from the front of `unread`; return it as chunks.

        Raises:
            RequestError: these are no chunks.
        """
        parts = list[bytes]()
        while unread and not self._is_over:
            if self._left:
                part = bytes(unread[: self._left])
                del unread[: len(part)]
                self._left -= len(part)
                self._ends_chunk = not self._left
                parts.append(part)
            elif (line := self._line(unread)) is None:
                break
            else:
                self._take_line(line)
        data = b"".join(parts)
        told = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return told + (b"0\r\n\r\n" if self._is_over else b"")

    def _line(self, unread: bytearray) -> bytes | None:
        """Take a line from `unread`, without its end; None where it is not whole."""
        end = unread.find(b"\n", 0, CHUNK_LINE_BYTES_MAX)
        if self._ends_chunk and not b"\r\n".startswith(unread[:2]):
            raise _fault("A chunk is longer than its size says")
        if self._trailer_bytes is not None:
            end = unread.find(b"\n", 0, TRAILER_BYTES_MAX)
        elif end < 0 and len(unread) >= CHUNK_LINE_BYTES_MAX:
            raise _fault(f"A chunk's size and extensions are over {CHUNK_LINE_BYTES_MAX} bytes")
        if end < 0:
            if len(unread) >= TRAILER_BYTES_MAX:
                raise _long_trailer()
            return None
        _check_line_end(unread, end)
        line = bytes(unread[: end - 1])
        del unread[: end + 1]
        return line

    def _take_line(self, line: bytes) -> None:
        if self._ends_chunk:
            self._ends_chunk = False
        elif self._trailer_bytes is not None:
            self._is_over = not line
            self._trailer_bytes += len(line)
            if self._trailer_bytes > TRAILER_BYTES_MAX:
                raise _long_trailer()
            if line:
                _field(line)
        elif found := _CHUNK_LINE.fullmatch(line):
            self._left = int(found[1], 16)
            self._trailer_bytes = None if self._left else 0
        else:
            raise _fault(f"A chunk's size is {line.decode('latin-1')!r:.60}; it must be hex digits")


# ---------------------------------------------------------------- lines


def _check_line_end(unread: bytearray, end: int) -> None:
    if unread[end - 1 : end] != b"\r":
        raise _fault("A line ends in LF alone; lines end in CR LF")


def _check_request_line(line: bytes) -> None:
    if not _REQUEST_LINE.fullmatch(line):
        shown = line.decode("latin-1")
        raise _fault(
            f"The request begins with {shown!r:.120}; it must begin with a method, a path that "
            "starts with '/', and HTTP/1.1 or HTTP/1.0"
        )


def _field(line: bytes) -> tuple[bytes, bytes]:
    """Return a header's name in lower case, and its value."""
    if line[:1] in (b" ", b"\t"):
        raise _fault("A header goes on in a second line; write it in one")
    if (found := _FIELD.fullmatch(line)) is None:
        name = line.partition(b":")[0].decode("latin-1")  # its value may be a key
        raise _fault(
            f"The header {name!r:.60} must be a name, ':' and a value without control bytes"
        )
    return found[1].lower(), found[2]


def _fault(text: str) -> RequestError:
    return RequestError(f"{text}.", code="malformed_request")


def _long_trailer() -> RequestError:
    return _fault(f"What follows the last chunk is over {TRAILER_BYTES_MAX:,} bytes")

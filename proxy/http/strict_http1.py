"""Shows h11 only HTTP/1.1 as RFC 9112 writes it: what can be read in two ways is refused before.

h11 takes bare line feeds, folded lines, control bytes, a length beside a coding and several equal
lengths, and has no setting against them. A proxy in front that reads any of these otherwise would
let a client hide one request in another.
"""

import re
from typing import Final

import h11
from h11._receivebuffer import ReceiveBuffer

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
            raise _fault(f"A chunk's size and extensions are over {CHUNK_LINE_BYTES_MAX} bytes")
        if line is not None:
            if (found := _CHUNK_LINE.fullmatch(line)) is None:
                raise _fault(f"A chunk's size is {_shown(line)}; it must be hex digits")
            size = int(found[1], 16)
            self._is_amid_trailers = not size
            self._chunks, self._chunk_bytes = self._chunks + 1, self._chunk_bytes + size
            if self._chunks > SMALL_CHUNKS_MAX and self._chunk_bytes < self._chunks * CHUNK_BYTES:
                raise _fault(
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
        raise _fault(
            f"The request begins with {_shown(head[:80])}; it must begin with a method, a path "
            "that starts with '/', HTTP/1.1 or HTTP/1.0, and CR LF"
        )
    if not is_whole:
        return
    _check_fields(head[line.end() :])
    lengths = _LENGTHS.findall(head)
    if len(lengths) > 1 or any(not _TOLD[line[1]].fullmatch(each) for each in lengths):
        raise _fault(
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
        raise _fault("A line ends in LF alone, or goes on in a second one; end each in CR LF")
    name = line.partition(b":")[0]  # its value may be a key
    raise _fault(f"The header {_shown(name)} must be a name, ':' and a value of no control bytes")


def _shown(text: bytes | bytearray) -> str:
    return f"{text.decode('latin-1')!r:.100}"


def _fault(text: str) -> h11.LocalProtocolError:
    return h11.LocalProtocolError(text)

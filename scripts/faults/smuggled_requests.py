"""Holds requests that are no HTTP as it must be, for the load and for the tests of the listener."""

from typing import Final

HOST: Final = b"Host: 127.0.0.1\r\n"
HIDDEN: Final = b"GET /hidden HTTP/1.1\r\n" + HOST + b"\r\n"
_GET: Final = b"GET /health HTTP/1.1\r\n"
_POST: Final = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST
_CHUNKED: Final = _POST + b"Transfer-Encoding: chunked\r\n\r\n"

# What is wrong -> the bytes.
SMUGGLED: Final[dict[str, bytes]] = {
    "a length and a coding": _POST
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a coding and a length": _POST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": _POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "two equal lengths": _POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a list of lengths": _POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "a length with a plus": _POST + b"Content-Length: +3\r\n\r\nabc",
    "a length with a space": _POST + b"Content-Length: 3 3\r\n\r\nabc",
    "a length with an underscore": _POST + b"Content-Length: 1_0\r\n\r\n0123456789",
    "a length below 0": _POST + b"Content-Length: -3\r\n\r\nabc",
    "an empty length": _POST + b"Content-Length:\r\n\r\n",
    "a length of many digits": _POST + b"Content-Length: 9" + b"9" * 5_000 + b"\r\n\r\n",
    "another coding": _POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two codings in one": _POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a coding before it": _POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "two codings": _POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an empty coding": _POST + b"Transfer-Encoding:\r\n\r\n0\r\n\r\n",
    "a coding behind a vertical tab": _POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a coding in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "lines that end in LF": b"GET /health HTTP/1.1\nHost: 127.0.0.1\n\n",
    "a header that ends in LF": _GET + HOST + b"X-A: b\nX-B: c\r\n\r\n",
    "an empty line of LF": _GET + HOST + b"\n",
    "a CR in a header": _GET + HOST + b"X-A: b\rX-B: c\r\n\r\n",
    "a folded header": _GET + HOST + b"X-A: b\r\n c\r\n\r\n",
    "a header folded by a tab": _GET + HOST + b"X-A: b\r\n\tc\r\n\r\n",
    "a folded first header": _GET + b" " + HOST + b"\r\n",
    "a space before a colon": _GET + HOST + b"Content-Length : 3\r\n\r\nabc",
    "a tab before a colon": _GET + HOST + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "a header without a colon": _GET + HOST + b"garbage\r\n\r\n",
    "a header without a name": _GET + HOST + b": b\r\n\r\n",
    "a NUL in a value": _GET + HOST + b"X-A: a\x00b\r\n\r\n",
    "a NUL in a name": _GET + HOST + b"X\x00A: b\r\n\r\n",
    "a control byte in a value": _GET + HOST + b"X-A: a\x01b\r\n\r\n",
    "a DEL in a value": _GET + HOST + b"X-A: a\x7fb\r\n\r\n",
    "a whole address": b"GET http://127.0.0.1/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "an authority": b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "an asterisk": b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    "a path without a slash": b"GET health HTTP/1.1\r\n" + HOST + b"\r\n",
    "a path with a space": b"GET /hea lth HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces": b"GET  /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "no Host": _GET + b"\r\n",
    "two Hosts": _GET + HOST + HOST + b"\r\n",
    "HTTP/0.9": b"GET /health\r\n",
    "HTTP/1.2": b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a version in lower case": b"GET /health http/1.1\r\n" + HOST + b"\r\n",
    "an empty line first": b"\r\n" + _GET + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    "a chunk in words": _CHUNKED + b"zz\r\nabc\r\n",
    "a chunk with 0x": _CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a chunk with a plus": _CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n",
    "a chunk below 0": _CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    "a chunk with an underscore": _CHUNKED + b"0_3\r\nabc\r\n0\r\n\r\n",
    "a chunk behind a space": _CHUNKED + b" 3\r\nabc\r\n0\r\n\r\n",
    "a chunk before a space": _CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "a chunk of many digits": _CHUNKED + b"F" * 25 + b"\r\nx",
    "a chunk without a size": _CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "a chunk's line of LF": _CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "a chunk's end of LF": _CHUNKED + b"3\r\nabc\n0\r\n\r\n",
    "a chunk that is longer": _CHUNKED + b"3\r\nabcdef\r\n0\r\n\r\n",
    "a chunk that is shorter": _CHUNKED + b"5\r\nabc\r\n0\r\n\r\n",
    "an extension of megabytes": _CHUNKED + b"3;" + b"a" * 2_000_000 + b"\r\nabc\r\n0\r\n\r\n",
    "an extension with LF": _CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n",
    "an extension with CR": _CHUNKED + b"3;a\rb\r\nabc\r\n0\r\n\r\n",
    "an end of LF": _CHUNKED + b"0\r\n\n",
    "a trailer with LF": _CHUNKED + b"0\r\nX-A: b\n\r\n",
    "a folded trailer": _CHUNKED + b"0\r\nX-A: b\r\n c\r\n\r\n",
    "a trailer without a colon": _CHUNKED + b"0\r\nabc\r\n\r\n",
    "a trailer of megabytes": _CHUNKED + b"0\r\n" + b"X-A: b\r\n" * 250_000 + b"\r\n",
}

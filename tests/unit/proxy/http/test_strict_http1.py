"""Attacks the reader of HTTP/1.1: what two readers could take for different requests is refused."""

import re

import h11
import pytest
from hypothesis import given, strategies as st

from hearth.proxy.http import http1_protocol
from hearth.proxy.http.http1_protocol import (
    CHUNK_BYTES,
    CHUNK_LINE_BYTES_MAX,
    HEAD_BYTES_MAX,
    SMALL_CHUNKS_MAX,
    StrictConnection,
)
from scripts.faults.smuggled_requests import HIDDEN, HOST, SMUGGLED

pytestmark = pytest.mark.pure

POST = b"POST /v1/messages HTTP/1.1\r\n" + HOST


def requests_in(*reads: bytes) -> list[tuple[bytes, bytes]]:
    """Return the targets and bodies of all requests in `reads`, each answered when it is whole.

    Raises:
        h11.RemoteProtocolError: what came is none.
    """
    connection = StrictConnection()
    found: list[tuple[bytes, bytes]] = []
    for data in reads:
        connection.receive_data(data)
        while (event := connection.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Request):
                found.append((event.target, b""))
            elif isinstance(event, h11.Data):
                found[-1] = (found[-1][0], found[-1][1] + event.data)
            elif isinstance(event, h11.EndOfMessage):
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return found
                connection.start_next_cycle()
    return found


def in_parts(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("wrong", sorted(SMUGGLED))
@pytest.mark.parametrize("size", [1 << 24, 7])
def test_smuggling_what_could_be_read_in_two_ways_is_a_fault_and_nothing_behind_it_is_read(
    wrong: str, size: int
) -> None:
    connection, targets = StrictConnection(), []
    with pytest.raises(h11.RemoteProtocolError) as caught:
        for data in in_parts(SMUGGLED[wrong][:70_000] + HIDDEN, size):
            connection.receive_data(data)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                targets += [event.target] if isinstance(event, h11.Request) else []
    assert len(str(caught.value)) < 300
    assert b"/hidden" not in targets
    connection.receive_data(HIDDEN)
    with pytest.raises(h11.RemoteProtocolError):
        connection.next_event()


def test_a_head_is_refused_at_its_bound_also_where_it_comes_at_once() -> None:
    for end in (b"", b"\r\n\r\n"):
        with pytest.raises(h11.RemoteProtocolError) as caught:
            requests_in(POST + b"X: " + b"a" * HEAD_BYTES_MAX + end)
        assert caught.value.error_status_hint == 431
    assert requests_in(POST + b"X: " + b"a" * (HEAD_BYTES_MAX - 100) + b"\r\n\r\n")


@pytest.mark.parametrize("before", [POST, POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"])
def test_slow_head_no_byte_is_looked_at_again_with_each_that_comes(
    monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    """Else a client without a key takes 2 ms of the event loop by each byte that it sends."""
    looked_at = []

    class Counted:
        def search(self, unread: bytes, start: int, most: int) -> re.Match[bytes] | None:
            looked_at.append(min(len(unread), most) - start)
            return end.search(unread, start, most)

    end = http1_protocol._END
    monkeypatch.setattr(http1_protocol, "_END", Counted())
    head = before + b"".join(b"x-%d: y\r\n" % each for each in range(200)) + b"\r\n"
    assert requests_in(*in_parts(head, 1))
    assert sum(looked_at) < 4 * len(head)


def test_a_body_of_many_small_chunks_is_refused_and_the_next_request_counts_anew() -> None:
    """Each chunk costs the event loop as much as 60 kB of a large one do."""
    body = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    large = b"41\r\n%b\r\n" % (b"a" * (CHUNK_BYTES + 1))
    small = b"3f\r\n%b\r\n" % (b"a" * (CHUNK_BYTES - 1))
    whole = body + small * SMALL_CHUNKS_MAX + b"0\r\n\r\n"
    with pytest.raises(h11.RemoteProtocolError, match="larger ones"):
        requests_in(whole)
    few = body + small * (SMALL_CHUNKS_MAX - 1) + b"0\r\n\r\n"
    many = body + (large * 2 + small) * SMALL_CHUNKS_MAX + b"0\r\n\r\n"
    assert len(requests_in(few + many + few)) == 3


def test_a_key_in_a_bad_header_is_not_told() -> None:
    with pytest.raises(h11.RemoteProtocolError) as caught:
        requests_in(POST + b"Authorization: Bearer \x01secret\r\n\r\n")
    assert "Authorization" in str(caught.value) and "secret" not in str(caught.value)


def test_what_clients_send_is_read() -> None:
    extension = b";a=" + b"b" * (CHUNK_LINE_BYTES_MAX - 20)
    good = [
        POST + b"Content-Length: 0003\r\n\r\nabc",
        POST + b"content-length:3\t \r\nX-Empty:\r\nX-Latin: \xe9\r\n\r\nabc",
        POST + b"TRANSFER-ENCODING: Chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1%b\r\na\r\n02\r\nbc\r\n00\r\n\r\n" % extension,
        POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-Sum: 1\r\nX-B:\r\n\r\n",
    ]
    for size in (1 << 20, 1, 5):
        reads = in_parts(b"".join(good) + HIDDEN, size)
        assert requests_in(*reads) == [(b"/v1/messages", b"abc")] * len(good) + [(b"/hidden", b"")]
    assert requests_in(b"GET /a HTTP/1.0\r\n\r\n") == [(b"/a", b"")]


def test_what_follows_a_request_that_was_the_last_is_not_read() -> None:
    last = POST + b"Connection: close\r\nContent-Length: 3\r\n\r\nabc"
    assert requests_in(last + HIDDEN) == [(b"/v1/messages", b"abc")]


@given(
    bodies=st.lists(st.binary(max_size=40), max_size=4),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=60),
)
def test_bodies_are_read_alike_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    sent = b""
    for number, body in enumerate(bodies):
        if number % 2:
            sent += POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        else:
            parts = [body[:3], body[3:]]
            chunks = b"".join(b"%x;e\r\n%b\r\n" % (len(part), part) for part in parts if part)
            sent += POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    reads = []
    for cut in cuts * (len(sent) + 1):
        if not sent:
            break
        reads.append(sent[:cut])
        sent = sent[cut:]
    assert requests_in(*reads) == [(b"/v1/messages", body) for body in bodies]

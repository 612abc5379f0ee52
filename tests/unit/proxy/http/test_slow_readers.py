"""Clients that read slowly, late or never: what is held for them, and for how long."""

import asyncio
import socket
import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.http import http1_protocol
from hearth.proxy.pool import worker_link
from hearth.proxy.pool.worker_link import MERGED_CHARS_MAX, AnswerStream
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Admitted, CallStart, Delta, Finished, TokenLogprob, Usage
from tests.helpers.proxy.proxy_app import serving

pytestmark = pytest.mark.process

CHANNELS = ("reasoning", "content")
BIG = 8 * 1024 * 1024


def opened() -> tuple[AnswerStream, list[bool]]:
    released: list[bool] = []
    answer = AnswerStream("r", released.append)
    answer.receive(Admitted("r", 5))
    return answer, released


def logprob(alternatives: int) -> TokenLogprob:
    return TokenLogprob(7, "x", b"x", -1.0, [[1, "x", b"x", -1.0]] * alternatives)


def by_run(deltas: list[Delta]) -> list[tuple[str, str, int, CallStart | None]]:
    """Return channel, text, log probabilities and call of each run, as a client reads them."""
    runs: list[tuple[str, str, int, CallStart | None]] = []
    for each in deltas:
        if runs and runs[-1][0] == each.channel and each.call is None:
            channel, text, rows, call = runs[-1]
            runs[-1] = (channel, text + each.text, rows + len(each.logprobs), call)
        else:
            runs.append((each.channel, each.text, len(each.logprobs), each.call))
    return runs


PIECES = st.tuples(
    st.sampled_from(CHANNELS), st.text("aé😀", max_size=3), st.integers(0, 2), st.booleans()
)


# A piece that the worker sends, or None: the client takes what is there.
@given(st.lists(st.none() | PIECES, max_size=40))
def test_whoever_reads_late_reads_the_same(pieces: list[Any]) -> None:
    async def body() -> None:
        answer, released = opened()
        sent: list[Delta] = []
        given: list[Delta] = []
        for piece in pieces:
            if piece is None:
                if isinstance(row := await answer.next_event(0), Delta):
                    given.append(row)
                continue
            channel, text, rows, is_call = piece
            call = CallStart(f"c{len(sent)}", "f") if is_call else None
            sent.append(Delta("r", len(sent), channel, text, [logprob(1)] * rows, call))
            answer.receive(sent[-1])
        answer.receive(Finished("r", "stop", None, Usage(5, 2, 3, 5)))
        while isinstance(row := await answer.next_event(), Delta):
            given.append(row)
        assert isinstance(row, Finished)
        assert by_run(given) == by_run(sent)
        assert answer.unread_bytes == 0
        assert released == [False]

    asyncio.run(body())


def test_a_client_that_reads_nothing_holds_little_more_than_the_text() -> None:
    answer, _ = opened()
    for number in range(10_000):
        answer.receive(Delta("r", number, "content", "word "))
    assert len(answer.inbox) <= 50_000 // MERGED_CHARS_MAX + 1
    assert sum(len(row.text) for row in answer.inbox if isinstance(row, Delta)) == 50_000


@pytest.mark.parametrize("alternatives", [0, 20])
async def test_an_answer_that_nobody_reads_is_given_up_at_its_bound(
    alternatives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "UNREAD_BYTES_MAX", 100_000)

    answer, released = opened()
    rows = [logprob(alternatives)] if alternatives else []
    number = 0
    while not released:
        answer.receive(Delta("r", number, "content", "x" * 100, rows))
        number += 1
    assert released == [True], "the worker is told to stop"
    assert number == 100_000 // (100 + len(rows) * 256 * 21) + 1
    with pytest.raises(RequestError, match="100,000 bytes") as caught:
        await answer.next_event()
    assert (caught.value.status, caught.value.code) == (503, "slow_reader")
    assert len(answer.inbox) == 1


async def lavish(scope: Any, receive: Any, send: Any) -> None:
    """Reply with BIG bytes at once."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * BIG, "more_body": False})


async def connected(port: int) -> socket.socket:
    """Return a connection that has asked, and takes no more than a small buffer holds."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(
        client, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    )
    return client


async def read_all(client: socket.socket, at_once: int, pause_s: float = 0.0) -> int:
    """Return how many bytes came before the end; -1 where the connection was cut off."""
    loop, size = asyncio.get_running_loop(), 0
    try:
        while data := await loop.sock_recv(client, at_once):
            size += len(data)
            await asyncio.sleep(pause_s)
    except ConnectionError:
        return -1
    finally:
        client.close()
    return size


async def test_a_client_that_never_reads_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1_protocol, "WRITE_WAIT_S_MAX", 0.2)

    async with serving(lavish) as port:  # type: ignore[arg-type]
        client = await connected(port)
        await asyncio.sleep(1.0)
        assert await read_all(client, 65_536) < BIG


@pytest.mark.night  # it takes longer than the limit that it is held to
async def test_a_client_that_reads_slowly_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it takes longer than the limit, and never stands still."""
    monkeypatch.setattr(http1_protocol, "WRITE_WAIT_S_MAX", 3.0)

    async with serving(lavish) as port:  # type: ignore[arg-type]
        client = await connected(port)
        began = time.monotonic()
        assert await read_all(client, 65_536, pause_s=0.06) > BIG
        assert time.monotonic() - began > 6.0

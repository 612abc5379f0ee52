"""The load: what it sends is whole, and each request it begins is entered with one end."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hearth.proxy.api import chat_completions, legacy_completions
from hearth.proxy.api.messages import messages_request
from hearth.proxy.api.responses import responses_request
from scripts.faults.judge_replies import End, events
from scripts.faults.load import (
    AMID_A_FAULT,
    CALM,
    FRESH,
    PATHS,
    SHARES,
    Asked,
    Ledger,
    Load,
    Manner,
    body_of,
    malformed,
    words,
)

pytestmark = pytest.mark.process

PARSERS = {
    "chat": chat_completions.parse,
    "completions": legacy_completions.parse,
    "messages": messages_request.parse,
    "responses": responses_request.parse,
}
BODY = b'{"error": {"message": "busy", "type": "server_error"}}'
BUSY = b"HTTP/1.1 503 X\r\nretry-after: 5\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
HELLO = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n'
PLAIN = Manner()
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_every_page_and_body_is_a_request_of_its_dialect() -> None:
    load = Load(1, seed=3)
    assert {row.dialect for row, _ in load.pages} == {"chat", "messages", "responses"}
    assert any("tools" in body for _, body in load.pages)
    for row, body in load.pages:
        PARSERS[row.dialect](json.loads(json.dumps(body)))
    for dialect in PATHS:
        PARSERS[dialect](body_of(dialect, "x"))


def test_bodies_that_are_wrong_are_so_in_every_dialect() -> None:
    rows = list(malformed())
    assert len(set(rows)) == len(rows) > 60
    assert {dialect for dialect, _ in rows} == set(PARSERS)


def test_what_is_asked_is_drawn_from_a_finite_set() -> None:
    """So what is remembered of it comes to its bound."""
    load = Load(1, seed=1)
    drawn = [load.draw() for _ in range(4_000)]
    assert {asked.kind for asked in drawn} == set(SHARES)
    texts = {words(number) for number in range(FRESH)}
    assert len(texts) == FRESH
    seen = set()
    for asked in drawn:
        if asked.kind in ("fresh", "stored", "leaving", "half-closing", "slow reader"):
            body = json.loads(asked.payload.partition(b"\r\n\r\n")[2])
            told = body.get("input") or body.get("prompt") or body["messages"][0]["content"]
            seen.add(told)
    assert seen <= texts and len(seen) > FRESH / 2


def entered(stage: str, kind: str, later: str = "") -> Ledger:
    """Enter one end of a request that began in `stage` and ends in `later`."""
    ledger = Ledger()
    ledger.stage = later or stage
    ledger.note(stage, Asked("page", "chat", b""), End(kind), 0.0)  # type: ignore[arg-type]
    return ledger


def test_in_calm_an_answer_is_the_only_good_end() -> None:
    assert not entered(CALM, "answered").misses
    for kind in ("busy", "failed", "refused", "cut", "hung", "bug", "malformed", "wrong"):
        assert entered(CALM, kind).misses, kind


def test_amid_a_fault_an_error_is_a_good_end_and_a_wrong_answer_never() -> None:
    for kind in ("answered", *AMID_A_FAULT):
        assert not entered("flood", kind).misses
        assert not entered(CALM, kind, later="flood").misses
    for kind in ("refused", "cut", "hung", "bug", "malformed", "wrong"):
        assert entered(CALM, kind, later="flood").misses, kind
        assert entered("flood", kind).misses, kind


def test_a_request_counts_for_the_fault_that_it_met() -> None:
    for ledger in (entered(CALM, "busy", later="flood"), entered("flood", "busy", later=CALM)):
        assert ledger.ends["flood"] == ledger.ends["page"] == {"busy": 1}


def test_the_last_error_of_what_was_under_way_is_timed() -> None:
    ledger = Ledger()
    with ledger.playing("worker killed"):
        ledger.stage_began -= 3.0
        ledger.note("worker killed", Asked("page", "chat", b""), End("failed"), 0.0)
        assert ledger.failed_s == 0.0, "it came behind the blow"
        ledger.note(CALM, Asked("page", "chat", b""), End("failed"), 0.0)
        assert 3.0 <= ledger.failed_s < 4.0


def test_a_connection_is_cut_rightly_only_while_there_is_no_proxy() -> None:
    ledger, asked = Ledger(), Asked("page", "chat", b"")
    with ledger.proxy_down():
        ledger.note(CALM, asked, End("cut"), 0.0)
    assert not ledger.misses
    ledger.note(CALM, asked, End("malformed"), 0.0)
    ledger.note(CALM, asked, End("cut"), float("inf"))  # begun after it was back
    assert len(ledger.misses) == 2


def with_server(serve: Serve, ask: Callable[[Load], Awaitable[Any]]) -> tuple[Any, Ledger]:
    async def run() -> tuple[Any, Ledger]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            load = Load(server.sockets[0].getsockname()[1], seed=1)
            return await ask(load), load.ledger

    return asyncio.run(run())


def asked_of(manner: Manner = PLAIN) -> Asked:
    return Asked("fresh", "chat", b"POST / HTTP/1.1\r\n\r\n{}", AMID_A_FAULT, False, manner)


@pytest.mark.parametrize(
    ("answer", "kind"), [(BUSY, "busy"), (BUSY[:-1], "cut"), (BUSY * 2, "malformed"), (b"", "cut")]
)
def test_what_comes_on_the_wire_is_judged(answer: bytes, kind: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    end, ledger = with_server(serve, lambda load: load.send(asked_of()))
    assert end.kind == kind
    assert (ledger.begun, ledger.ended) == (1, 1)
    assert bool(ledger.misses) == (kind != "busy")


def test_a_client_that_leaves_has_left_whatever_came() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(BUSY[:10])
        await reader.read()
        writer.close()

    manner = Manner(leaves_s=0.05, resets=True)
    end, ledger = with_server(serve, lambda load: load.send(asked_of(manner)))
    assert (end.kind, ledger.begun, ledger.ended) == ("left", 1, 1)


@pytest.mark.parametrize("second", ["x", "y"])
def test_a_known_page_has_one_right_answer(second: str) -> None:
    said = iter(("x", second))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = HELLO.replace(b'"x"', b'"%b"' % next(said).encode()) + b"data: [DONE]\n\n"
        head = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        writer.close()

    async def ask(load: Load) -> End:
        (load.pages[:],) = ([row for row in load.pages if row[0].dialect == "chat"][:1],)
        await load.learn(lambda: asyncio.sleep(0))
        return await load.send(load.page(0))

    end, ledger = with_server(serve, ask)
    assert end.kind == ("answered" if second == "x" else "wrong")
    assert bool(ledger.misses) == (second != "x")


def test_a_client_that_half_closes_is_judged_by_its_whole_answer_less_what_it_was_asked_by() -> (
    None
):
    assert list(events(b"data: {}\n\n: \n\ndata: [DONE]\n\n")) == [{}, "[DONE]"]
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read())  # to the end of its side
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + BUSY)
        writer.close()

    end, _ = with_server(serve, lambda load: load.send(asked_of(Manner(half_closes=True))))
    assert end.kind == "busy"
    assert seen[0].endswith(b"{}")

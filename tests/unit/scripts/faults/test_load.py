"""The load: what it sends is whole, and each request it begins is entered with one end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from scripts.faults.judge_replies import End
from scripts.faults.load import (
    AMID_A_FAULT,
    CALM,
    Asked,
    Ledger,
    Load,
)

pytestmark = pytest.mark.process

HELLO = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n'
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


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


def with_server(serve: Serve, ask: Callable[[Load], Awaitable[Any]]) -> tuple[Any, Ledger]:
    async def run() -> tuple[Any, Ledger]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            load = Load(server.sockets[0].getsockname()[1], seed=1)
            return await ask(load), load.ledger

    return asyncio.run(run())


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

"""Chaos' clients: what they send is whole, and each request they begin is entered with one end."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable

import pytest

from hearth.proxy.api import chat_completions, legacy_completions
from hearth.proxy.api.messages import messages_request
from hearth.proxy.api.responses import responses_request
from scripts.chaos import attacks, delays, judge_replies
from scripts.chaos.__main__ import Level, bugs_in
from scripts.chaos.clients import CALM, CALM_ENDS, GOOD, Client, Known, Ledger, Manner, known
from scripts.chaos.judge_replies import End, Said
from scripts.chaos.request_bodies import TALKING, bulky, fresh, garbage, malformed, odd, pages

PARSERS = {
    "chat": chat_completions.parse,
    "completions": legacy_completions.parse,
    "messages": messages_request.parse,
    "responses": responses_request.parse,
}
BODY = b'{"error": {"message": "busy", "type": "server_error"}}'
BUSY = b"HTTP/1.1 503 X\r\nretry-after: 5\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_every_page_is_a_request_of_its_dialect_and_goes_on_from_the_one_before() -> None:
    book = pages(random.Random(3), 6)
    assert {page.dialect for page in book} == set(TALKING)
    assert any("tools" in page.body for page in book)
    for page in book:
        parsed = PARSERS[page.dialect](json.loads(json.dumps(page.body)))
        assert parsed.prompt.messages[-1]["role"] in ("user", "tool")
    for dialect in PARSERS:
        PARSERS[dialect](fresh(random.Random(1), dialect))
    chat_completions.parse(bulky(random.Random(1)))


def test_bodies_that_are_wrong_are_so_in_every_dialect() -> None:
    rows = [*malformed(), *odd()]
    assert len({(name, dialect) for name, dialect, _ in rows}) == len(rows) > 80
    assert {dialect for _, dialect, _ in rows} == set(PARSERS)
    assert len({name for name, _ in garbage(1)}) > 15


def entered(stage: str, kind: str, later: str = "", allowed: frozenset[str] = CALM_ENDS) -> Ledger:
    """Enter one end of a request that began in `stage` and ends in `later`."""
    ledger = Ledger()
    ledger.stage = later or stage
    ledger.note(stage, "chat", End(kind), 0.0, allowed)  # type: ignore[arg-type]
    return ledger


def test_in_calm_an_answer_is_the_only_good_end() -> None:
    assert not entered(CALM, "answered").misses
    for kind in ("busy", "failed", "refused", "cut", "hung", "bug", "malformed", "wrong"):
        assert entered(CALM, kind).misses, kind


def test_amid_a_fault_an_error_is_a_good_end_and_a_wrong_answer_never() -> None:
    for kind in GOOD:
        assert not entered("flood", kind).misses
        assert not entered(CALM, kind, later="flood").misses
    for kind in ("refused", "cut", "hung", "bug", "malformed", "wrong"):
        assert entered(CALM, kind, later="flood").misses, kind
        assert entered("flood", kind, allowed=GOOD).misses, kind


def test_a_request_counts_for_the_fault_that_it_met() -> None:
    assert entered(CALM, "busy", later="flood").tallies["flood"].ends == {"busy": 1}
    assert entered("flood", "busy", later=CALM).tallies["flood"].ends == {"busy": 1}


def test_a_connection_is_cut_rightly_only_while_there_is_no_proxy() -> None:
    ledger = Ledger()
    with ledger.proxy_down():
        ledger.note(CALM, "chat", End("cut"), 0.0, CALM_ENDS)
    assert not ledger.misses
    ledger.note(CALM, "chat", End("malformed"), 0.0, CALM_ENDS)
    ledger.note(CALM, "chat", End("cut"), float("inf"), CALM_ENDS)  # begun after it was back
    assert len(ledger.misses) == 2


def test_memory_has_grown_where_it_did_so_by_its_share_and_by_more_than_sessions_remember() -> None:
    def has_grown(before_mb: int, after_mb: int) -> bool:
        before, after = (
            Level("worker 0", 1, each * 1_000_000, 9) for each in (before_mb, after_mb)
        )
        return after.has_grown_since(before)

    assert not has_grown(150, 182)
    assert has_grown(150, 183)
    assert not has_grown(1_000, 1_050)
    assert has_grown(1_000, 1_051)
    assert not has_grown(183, 150)


def test_an_exception_of_a_poison_prompt_is_no_bug_and_any_other_is() -> None:
    broke = "10:00:00 worker-0 E the inference thread broke; the supervisor starts a clean worker\n"
    trace = '  File "x.py", line 76, in guard\n    yield\n'
    ours, theirs = "Poisoned (LOG_PROMPTS=true shows its text)\n", "ValueError\n"
    went_on = "10:00:01 proxy E worker died id=0 how=exit code 70 requests=3\n"
    assert not list(bugs_in(broke + trace + ours + went_on))
    assert list(bugs_in(broke + trace + theirs + went_on)) == [broke.strip()]
    assert len(list(bugs_in(broke + trace + ours + broke + trace + theirs))) == 1
    assert list(bugs_in("Traceback (most recent call last):\n" + went_on)) == [
        "Traceback (most recent call last):"
    ]


def with_server(serve: Serve, ask: Callable[[Client], Awaitable[End]]) -> tuple[End, Ledger]:
    async def run() -> tuple[End, Ledger]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            ledger = Ledger()
            end = await ask(Client(server.sockets[0].getsockname()[1], ledger))
            return end, ledger

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "kind"), [(BUSY, "busy"), (BUSY[:-1], "cut"), (BUSY * 2, "malformed"), (b"", "cut")]
)
def test_what_comes_on_the_wire_is_judged(answer: bytes, kind: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    end, ledger = with_server(serve, lambda client: client.ask("chat", b"", allowed=GOOD))
    assert end.kind == kind
    assert (ledger.begun, ledger.ended) == (1, 1)
    assert bool(ledger.misses) == (kind != "busy")


def test_a_client_that_leaves_has_left_whatever_came() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(BUSY[:10])
        await reader.read()
        writer.close()

    manner = Manner(leaves_s=0.05, resets=True)
    end, ledger = with_server(serve, lambda client: client.ask("chat", b"{}", manner))
    assert (end.kind, ledger.begun, ledger.ended) == ("left", 1, 1)


def test_pages_whose_answer_depends_on_what_was_asked_before_are_left_out() -> None:
    book = pages(random.Random(1), 1)

    class Forgetful(Client):
        """Answers the last page otherwise when the first was asked before it."""

        asked: list[object]

        async def ask(self, dialect: str, body: object, *_: object, **__: object) -> End:  # type: ignore[override]
            self.asked.append(body)
            depends = body == book[-1].body and book[0].body in self.asked
            return End("answered", said=Said("2" if depends else "1"))

    async def forget() -> None:
        pass

    client = Forgetful(1, Ledger())
    client.asked = []
    found = asyncio.run(known(client, book, forget))
    assert found == [Known(page, Said("1")) for page in book[:-1]]


def test_huge_bodies_are_json_that_the_server_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MESSAGES", "OPTIONS", "PROPERTIES", "TOOLS"):
        assert getattr(attacks, name) > 10_000
        monkeypatch.setattr(attacks, name, 10)
    rows = [(dialect, json.loads(body)) for dialect, body in attacks.huge.__wrapped__()]
    assert len(rows) == 6 and {dialect for dialect, _ in rows} == set(TALKING)
    for dialect, body in rows:
        PARSERS[dialect](body)
    assert len(rows[0][1]["chat_template_kwargs"]) == len(rows[1][1]["messages"]) == 10
    assert len(rows[-1][1]["tools"]) == 10


def test_a_client_that_half_closes_is_judged_by_its_whole_answer_less_what_it_was_asked_by() -> (
    None
):
    events = b"data: {}\n\n: \n\ndata: [DONE]\n\n"
    assert judge_replies.events(events) == [{}, "[DONE]"]
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read())  # to the end of its side
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + BUSY)
        writer.close()

    async def run() -> str:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            client = Client(server.sockets[0].getsockname()[1], Ledger())
            return (await client.ask("chat", {}, Manner(half_closes=True), GOOD)).kind

    assert asyncio.run(run()) == "busy"
    assert seen[0].endswith(b"{}")


def delay(fault: str, worst_s: float, deaths: int = 0) -> delays.Delay:
    return delays.Delay(fault, 5, 0, calm_worst_s=0.5, worst_s=worst_s, deaths=deaths)


def test_a_delay_is_too_long_over_a_second_but_for_a_death_and_for_much_work_asked_for() -> None:
    assert not delay("huge bodies", 1.4).is_too_long
    assert delay("huge bodies", 1.6).is_too_long
    assert not delay("huge bodies", 1.6, deaths=1).is_too_long
    assert not delay("flood", 9.0).is_too_long
    assert not delay("worker killed", 9.0).is_too_long
    text = "\n".join(delays.delay_lines([delay("huge bodies", 1.6), delay("flood", 9.0)]))
    assert text.count("TOO LONG") == 1

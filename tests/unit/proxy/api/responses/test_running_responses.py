"""Responses in background over fake workers: made for nobody who waits, and ended once by one."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from hearth.proxy.api.responses import event_log, running_responses
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.api.responses.running_responses import RunningResponses
from hearth.proxy.http.body_memory_budget import BodyBudget
from hearth.proxy.http.http_exchange import ClientGone, HttpExchange
from hearth.proxy.request.session_id import key_digest
from hearth.shared.errors import RequestError
from tests.helpers.proxy.app_over_workers import Front, front
from tests.helpers.proxy.fake_worker_pool import run
from tests.helpers.proxy.proxy_app import Reply, asked

pytestmark = pytest.mark.process

SLOW = "n=2000 delay=0.02"
KEYS = {"PROXY_API_KEYS": "k, other"}
OTHER = (b"x-api-key", b"other")
MINE = (b"x-api-key", b"k")


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator["Client"]:
    async with front(1, **KEYS) as made:
        yield Client(made)


class Client:
    """A client of responses over one fake worker."""

    def __init__(self, made: Front) -> None:
        self.front = made

    async def create(self, script: str, **fields: Any) -> Reply:
        body = {"model": "claude-x", "input": script, "background": True} | fields
        return await self.front.ask("POST", "/v1/responses", body=orjson.dumps(body))

    async def begun(self, script: str, **fields: Any) -> str:
        reply = await self.create(script, **fields)
        assert (reply.status, reply.json["status"], reply.json["background"]) == (
            200,
            "queued",
            True,
        )
        response_id: str = reply.json["id"]
        return response_id

    async def get(self, response_id: str, query: bytes = b"", key: Any = MINE) -> Reply:
        path = f"/v1/responses/{response_id}"
        return await asked(self.front.app, "GET", path, key, query=query)

    async def post_cancel(self, response_id: str, key: Any = MINE) -> Reply:
        return await self.front.ask_as(key, "POST", f"/v1/responses/{response_id}/cancel")

    async def until(self, response_id: str, *states: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                told: dict[str, Any] = (await self.get(response_id)).json
                if told["status"] in states:
                    return told
                await asyncio.sleep(0.01)

    async def said(self, response_id: str) -> None:
        """Wait until some of its text has come."""
        running = self.front.app.routes.running.running(key_digest({"x-api-key": "k"}), response_id)
        assert running is not None and running.events is not None, response_id
        events = running.events
        await self.front.made.until(lambda: events.next_number > 6)

    async def idle(self, left: int = 0) -> None:
        """Wait until the worker has `left` requests; with none, nothing is held for one."""
        (link,) = self.front.made.pool.links.values()
        await self.front.made.until(lambda: len(link.answers) == left)
        budget = self.front.app.body_budget
        await self.front.made.until(lambda: left or not budget.bytes_held)


def events_of(reply: Reply) -> list[dict[str, Any]]:
    lines = reply.content.decode().splitlines()
    return [orjson.loads(line[6:]) for line in lines if line.startswith("data: ")]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for row in response["output"] for part in row["content"])


def test_a_response_is_made_while_nobody_waits_and_each_end_is_told() -> None:
    async def body() -> None:
        async with opened() as client:
            whole = await client.until(await client.begun("n=5"), "completed")
            assert text_of(whole) == "tok0 tok1 tok2 tok3 tok4 "
            assert whole["usage"]["output_tokens"] == 5
            cut = await client.until(await client.begun("n=5", max_output_tokens=2), "incomplete")
            assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
            broken = await client.until(await client.begun("n=5 fail=3"), "failed")
            assert (broken["error"]["code"], text_of(broken)) == ("internal_error", "tok0 tok1 ")
            refused = await client.until(await client.begun("refuse=503:overloaded"), "failed")
            assert refused["error"]["code"] == "overloaded" and refused["output"] == []
            again = await client.create("n=1", previous_response_id=whole["id"], background=False)
            assert again.json["previous_response_id"] == whole["id"]
            await client.idle()
            rows = client.front.app.routes.requests.recent(key_digest({"x-api-key": "k"}))
            assert [row["ended"] for row in rows] == ["stop", "internal_error", "length", "stop"]

    run(body)


@pytest.mark.parametrize("end", ["a cancel", "a worker that died", "a length"])
def test_an_item_of_a_response_in_background_was_never_closed(end: str) -> None:
    async def body() -> None:
        async with opened() as client:
            is_cut = end == "a length"
            fields = {"max_output_tokens": 2} if is_cut else {}
            response_id = await client.begun("n=5" if is_cut else SLOW, **fields)
            if not is_cut:
                await client.said(response_id)
            if end == "a cancel":
                await client.post_cancel(response_id)
            elif end == "a worker that died":
                os.kill(client.front.made.supervisor.pids[0], signal.SIGKILL)
            kept = await client.until(response_id, "cancelled", "failed", "incomplete")
            events = events_of(await client.get(response_id, b"stream=true"))
            ended = [row["item"] for row in events if row["type"].endswith("output_item.done")]
            assert ended == kept["output"] == events[-1]["response"]["output"] != []
            added = [row for row in events if row["type"].endswith("output_item.added")]
            assert len(added) == len(ended)
            assert {item["status"] for item in ended} <= {"completed", "incomplete"}

    run(body)


def test_what_is_wrong_with_a_request_is_said_at_once() -> None:
    async def body() -> None:
        async with opened() as client:
            for fields, status in (
                ({"store": False}, 400),
                ({"input": 5}, 400),
                ({"background": "yes"}, 400),
                ({"stream": "yes"}, 400),
                ({"model": "none"}, 404),
                ({"previous_response_id": "resp_0"}, 404),
            ):
                reply = await client.create("n=1", **fields)
                assert (reply.status, "error" in reply.json) == (status, True), fields
            assert not client.front.made.events("Submit")
            slow = await client.begun(SLOW)
            reply = await client.create("n=1", previous_response_id=slow)
            assert reply.json["error"]["code"] == "response_not_ended"
            await client.post_cancel(slow)
            await client.idle()

    run(body)


def test_a_response_is_cancelled_once_by_its_own_key() -> None:
    async def body() -> None:
        async with opened() as client:
            slow = await client.begun(SLOW)
            await client.said(slow)
            for reply in (
                await client.post_cancel(slow, OTHER),
                await client.get(slow, b"", OTHER),
            ):
                assert reply.status == 404
            first = (await client.post_cancel(slow)).json
            assert first["status"] == "cancelled" and first["usage"] is None
            assert text_of(first).startswith("tok0 ")
            again = await client.post_cancel(slow)
            assert again.json == first == (await client.get(slow)).json
            await client.idle()
            await client.front.made.until(lambda: client.front.made.events("Cancel"))
            unread = await client.begun(f"prefill=60 {SLOW}")
            assert (await client.post_cancel(unread)).json["status"] == "cancelled"
            ended = await client.until(await client.begun("n=1"), "completed")
            assert (await client.post_cancel(ended["id"])).json == ended
            gone = await client.begun(SLOW)
            path = f"/v1/responses/{gone}"
            assert (await client.front.ask("DELETE", path)).json["deleted"] is True
            assert (await client.get(gone)).status == 404
            await client.idle()

    run(body)


def test_a_stream_is_left_and_taken_up_again_without_a_gap() -> None:
    async def body() -> None:
        async with opened() as client:
            whole = events_of(await client.create("n=30 delay=0.005", stream=True))
            numbers = [row["sequence_number"] for row in whole]
            assert numbers == list(range(len(whole)))
            kinds = [row["type"].removeprefix("response.") for row in whole]
            assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "completed"
            ours = whole[0]["response"]["id"]
            for after in (0, 7, len(whole) - 2, len(whole)):
                reply = await client.get(ours, b"stream=true&starting_after=%d" % after)
                assert events_of(reply) == whole[after + 1 :]
            assert events_of(await client.get(ours, b"stream=true")) == whole
            slow = await client.begun("n=40 delay=0.02")
            followed = events_of(await client.get(slow, b"stream=true&starting_after=1"))
            assert [row["sequence_number"] for row in followed] == list(range(2, len(followed) + 2))
            assert followed[-1]["type"] == "response.completed"
            assert (await client.get(ours, b"stream=true&starting_after=x")).status == 400
            assert (await client.get(ours, b"stream=true", OTHER)).status == 404
            plain = await client.create("n=1", background=False)
            refused = await client.get(plain.json["id"], b"stream=true")
            assert refused.json["error"]["param"] == "stream"

    run(body)


def test_a_response_that_streams_to_its_client_is_cancelled_by_its_id() -> None:
    async def body() -> None:
        async with opened() as client:
            streaming = asyncio.create_task(client.create(SLOW, background=False, stream=True))
            made = client.front.made
            await made.until(lambda: made.events("Submit"))
            response_id = f"resp_{made.events('Submit')[0]['request_id']}"
            assert (await client.post_cancel(response_id, OTHER)).status == 404
            await asyncio.sleep(0.2)
            told = (await client.post_cancel(response_id)).json
            last = events_of(await streaming)[-1]
            assert (last["type"], last["response"]) == ("response.incomplete", told)
            assert told["status"] == "cancelled"
            assert (await client.get(response_id)).json == told
            await client.idle()

    run(body)


def test_only_so_many_are_in_background_and_a_stop_ends_all(monkeypatch: Any) -> None:
    monkeypatch.setattr(running_responses, "KEY_RUNNING_MAX", 2)

    async def body() -> None:
        async with opened() as client:
            slow = [await client.begun(SLOW) for _ in range(2)]
            reply = await client.create(SLOW)
            assert reply.status == 429
            assert reply.json["error"]["message"].startswith(
                "2 responses of this key, and 2 of all"
            )
            await client.post_cancel(slow[0])
            await client.idle(left=1)
            more = await client.begun(SLOW)
            await client.until(more, "in_progress")
            client.front.made.pool.close()
            await client.front.app.routes.running.close()
            for response_id in (slow[1], more):
                told = (await client.get(response_id)).json
                assert told["status"] == "failed"
                assert told["error"]["message"] == "The server is shutting down."

    run(body)


def test_a_client_that_leaves_before_it_knows_an_id_leaves_nothing_running() -> None:
    budget, incoming = BodyBudget(), asyncio.Queue[Any]()
    incoming.put_nowait({"type": "http.request", "body": b"12345", "more_body": False})
    held = []

    async def send(_: Any) -> None:
        raise AssertionError("nobody is there")

    async def answer(detached: HttpExchange) -> None:
        """Go on with a request that is not accepted yet, and has no end of its own."""
        incoming.put_nowait({"type": "http.disconnect"})
        try:
            await detached.while_connected(asyncio.Event().wait())
        finally:
            held.append(budget.bytes_held)

    async def body() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": [MINE]}
        exchange = HttpExchange(scope, incoming.get, send, budget)
        await exchange.read_body()
        running = RunningResponses(ResponseStore())
        with pytest.raises(ClientGone):
            await running.serve(exchange, answer, wants_events=False)
        exchange.end()
        await running.close()
        assert held == [5], "the body is held as long as its request goes on"
        assert budget.bytes_held == 0

    run(body)


def test_the_oldest_events_go_where_there_are_too_many(monkeypatch: Any) -> None:
    monkeypatch.setattr(event_log, "LOG_BYTES_MAX", 30)

    async def body() -> None:
        log = event_log.EventLog()
        for number in range(5):
            log.add(b"%010d" % number)
        log.end()
        assert log.nbytes == 30
        assert [frame async for frame in log.follow(1)] == [b"%010d" % n for n in (2, 3, 4)]
        with pytest.raises(RequestError, match="Events up to number 1"):
            log.check(0)

    asyncio.run(body())

"""Checks the answers of a full server: 503 with a time to retry, queue lengths, body budgets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hearth.proxy.app import ProxyApp
from hearth.proxy.http import http_exchange
from tests.helpers.proxy.app_over_workers import KEY, Front, front
from tests.helpers.proxy.proxy_app import app_of
from tests.helpers.proxy.request_bodies import OTHER_KEY, PATHS, body_of
from tests.helpers.worker_processes.fake_worker import REQUESTS_MAX

pytestmark = pytest.mark.process


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_full_worker_is_a_503_that_says_when_to_come_back(path: str, stream: bool) -> None:
    async with front(1) as made:
        text = "refuse=503:overloaded retry=42"
        reply = await made.ask("POST", path, body=body_of(path, text, stream=stream))
        assert (reply.status, reply.headers["retry-after"]) == (503, "42")
        error = reply.json["error"]
        if path == "/v1/messages":
            assert (reply.json["type"], error["type"]) == ("error", "overloaded_error")
        else:
            assert (error["type"], error["code"]) == ("server_error", "overloaded")
        assert error["message"] == "Refused as asked with 503."


async def test_other_workers_are_asked_where_one_is_full() -> None:
    async with front(3) as made:
        text, _ = await made.generate("n=2 full=01")
        assert text
        assert len({row["pid"] for row in made.made.events("Submit")}) == 3


async def test_the_refusal_is_told_where_all_are_full_and_no_link_keeps_anything() -> None:
    async with front(3) as made:
        content = body_of("/v1/responses", "n=2 full=012")
        reply = await made.ask("POST", "/v1/responses", body=content)
        assert (reply.status, reply.headers["retry-after"]) == (503, "7")
        assert len(made.made.events("Submit")) == 3
        assert not any(link.load for link in made.made.pool.links.values())


@contextlib.asynccontextmanager
async def asking(made: Front, *keys: tuple[bytes, bytes]) -> AsyncIterator[list[str]]:
    """Have an answer without end asked with each key, one by one; give the requests' ids."""
    content = body_of("/v1/responses", "n=9999 delay=0.2 secret")
    async with asyncio.TaskGroup() as group:
        tasks = []
        for count, key in enumerate(keys, start=1):
            one = made.open_ask("POST", "/v1/responses", key, body=content)
            tasks.append(group.create_task(one))
            await made.made.until(lambda count=count: len(made.made.events("Submit")) == count)
        yield [row["request_id"] for row in made.made.events("Submit")]
        for task in tasks:
            task.cancel()


async def waiting(made: Front, count: int, *key: tuple[bytes, bytes]) -> list[dict[str, Any]]:
    """Return the queue as /health tells it to `key`, once `count` are in it."""
    while True:
        reply = await made.open_ask("GET", "/health", *key)
        rows: list[dict[str, Any]] = reply.json.get("queue", [])
        if len(rows) == count:
            return rows
        await asyncio.sleep(0.05)


async def test_health_tells_the_queue_and_its_wait_and_no_word_of_a_prompt() -> None:
    async with front(1) as made, asking(made, KEY, KEY, KEY) as ids:
        first, second = await waiting(made, 2, KEY)
        assert (first["position"], second["position"]) == (1, 2)
        assert first["worker"] == second["worker"] == 0
        assert first["age_s"] >= second["age_s"] >= 0
        asker = {"session", "client", "title", "age_s"}
        assert set(first) == {"request_id", "worker", "position", *asker}
        assert first["title"] == "n=9999 delay=0.2 secret", "which its own key sees"
        rows = [{"worker": 0, "request_id": name} for name in (ids[0], "ended meanwhile")]
        (running,) = made.made.pool.with_requesters(rows)
        assert (running["request_id"], running["title"]) == (ids[0], first["title"])
        health = await made.open_ask("GET", "/health")
        assert "queue" not in health.json, "nobody is told whose request is where"
        assert b"secret" not in health.content
        assert (health.json["ready"], health.json["free"]) == (True, REQUESTS_MAX - 3)
        ready = await made.open_ask("GET", "/health/ready")
        assert (ready.status, ready.json["free"]) == (200, REQUESTS_MAX - 3)
        (worker,) = health.json["workers"]
        assert (worker["running"], worker["waiting"], worker["wait_s"]) == (1, 2, 3.0)
        assert [first["request_id"], second["request_id"]] == ids[1:]


async def test_with_several_keys_each_is_told_of_its_own_requests_only() -> None:
    keys = (KEY, KEY, OTHER_KEY, OTHER_KEY)
    async with front(1, PROXY_API_KEYS="other") as made, asking(made, *keys) as ids:
        theirs = await waiting(made, 2, OTHER_KEY)
        mine = await waiting(made, 1, KEY)
        places = [(row["position"], row["request_id"]) for row in [*mine, *theirs]]
        assert places == list(enumerate(ids))[1:], "the others' are counted, not told"


# ---------------------------------------------------------------- what bodies may take


PATH = "/v1/responses"
TALK = 4_000  # characters: more than half of the room


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_exchange, "BODIES_BYTES_MAX", 6_000)


def long_body(words: str) -> bytes:
    return body_of(PATH, f"{words} {'x' * TALK}")


async def test_a_body_that_finds_no_room_is_refused_unread_and_served_when_there_is(
    little_room: None,
) -> None:
    async with front(1) as made:
        first = asyncio.create_task(made.ask("POST", PATH, body=long_body("n=2 prefill=1")))
        await made.made.until(lambda: made.made.events("Submit"))
        content = long_body("n=2")
        length = (b"content-length", str(len(content)).encode())
        for headers in ([length], []):  # told before it comes, or counted while it does
            reply = await made.ask("POST", PATH, *headers, body=content)
            assert (reply.status, reply.headers["retry-after"]) == (503, "5")
            error = reply.json["error"]
            assert error["code"] == "overloaded"
            assert "this server holds 6,000 at once" in error["message"]
        assert (await made.ask("POST", PATH, body=body_of(PATH, "n=2"))).status == 200
        assert (await first).status == 200
        assert (await made.ask("POST", PATH, length, body=content)).status == 200
        assert len(made.made.events("Submit")) == 3
        assert made.app.body_budget.bytes_held == 0


async def replied(
    edge: ProxyApp, messages: list[Any], *headers: tuple[bytes, bytes]
) -> tuple[int, list[int]]:
    """Return the status that a client which sends `messages` gets, and what was held at each."""
    sent: list[Any] = []
    held: list[int] = []

    async def receive() -> Any:
        held.append(edge.body_budget.bytes_held)
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": PATH}
    await edge(scope | {"headers": [(b"host", b"127.0.0.1"), *headers]}, receive, send)
    return sent[0]["status"] if sent else 0, held


def part(size: int, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": b" " * size, "more_body": more}


LEFT = {"type": "http.disconnect"}


@pytest.mark.parametrize(
    "messages",
    [
        [part(3_000), LEFT],
        [part(3_000), part(10, more=False)],
        [part(3_000), part(9_000), part(10, more=False)],
        [part(5_000), part(900), part(900), part(10, more=False)],
    ],
    ids=["left", "no json", "too much at once", "too much by and by"],
)
async def test_whatever_becomes_of_a_body_its_room_is_free_again(
    tmp_path: Any, little_room: None, messages: list[Any]
) -> None:
    edge = app_of(tmp_path)
    _, held = await replied(edge, [*messages, LEFT])
    assert max(held) <= 6_000
    assert edge.body_budget.bytes_held == 0


@pytest.mark.parametrize(
    ("length", "messages", "status"),
    [
        (None, [part(900), part(900), part(900, more=False)], 413),
        (b"1800", [part(900), part(900, more=False)], 413),
        (b"8000", [part(8_000, more=False)], 413),  # more than there is room for, too
        (b"900", [LEFT], 0),
    ],
    ids=["turns out too long", "is told to be too long", "has no room either", "is only told"],
)
async def test_a_body_past_its_own_limit_is_told_of_that_and_takes_no_room(
    tmp_path: Any,
    little_room: None,
    monkeypatch: pytest.MonkeyPatch,
    length: bytes | None,
    messages: list[Any],
    status: int,
) -> None:
    monkeypatch.setattr(http_exchange, "BODY_BYTES_MAX", 1_000)
    headers = [(b"content-length", length)] if length else []
    told, held = await replied(app_of(tmp_path), [*messages, LEFT], *headers)
    assert told == status
    assert set(held[:1] + held[2:]) <= {0}, "but for the first part of one without a length"

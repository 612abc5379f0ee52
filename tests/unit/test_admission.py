"""Who is told to come back and when, and who is told who waits: scripted workers, no LiteLLM."""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from tests.unit.test_proxy_cache import KEY, Front, front
from tests.unit.test_proxy_pool import run

OTHER_KEY = (b"x-api-key", b"other")
PATHS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 9,
    },
}


def body_of(path: str, text: str, **fields: Any) -> bytes:
    return orjson.dumps({"model": "claude-x", **PATHS[path](text), **fields})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_full_worker_is_a_503_that_says_when_to_come_back(path: str, stream: bool) -> None:
    async def body() -> None:
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

    run(body)


def test_other_workers_are_asked_where_one_is_full() -> None:
    async def body() -> None:
        async with front(3) as made:
            text, _ = await made.generate("n=2 full=01")
            assert text
            asked = {row["pid"] for row in made.made.events("Submit")}
            assert len(asked) == 3

    run(body)


def test_the_refusal_is_told_where_all_are_full_and_no_link_keeps_anything() -> None:
    async def body() -> None:
        async with front(3) as made:
            content = body_of("/v1/responses", "n=2 full=012")
            reply = await made.ask("POST", "/v1/responses", body=content)
            assert (reply.status, reply.headers["retry-after"]) == (503, "7")
            assert len(made.made.events("Submit")) == 3
            assert not any(link.load for link in made.made.pool.links.values())

    run(body)


async def waiting(made: Front, count: int, *key: tuple[bytes, bytes]) -> list[dict[str, Any]]:
    """Return the queue as /health tells it to `key`, once `count` are in it."""
    while True:
        reply = await made.open_ask("GET", "/health", *key)
        rows: list[dict[str, Any]] = reply.json.get("queue", [])
        if len(rows) == count:
            return rows
        await asyncio.sleep(0.05)


def test_health_tells_the_queue_and_its_wait_and_no_word_of_a_prompt() -> None:
    async def body() -> None:
        async with front(1) as made:
            asking = [asyncio.create_task(made.generate("n=9 delay=0.2 secret")) for _ in range(3)]
            first, second = await waiting(made, 2, KEY)
            assert (first["position"], second["position"]) == (1, 2)
            assert first["worker"] == second["worker"] == 0
            assert first["age_s"] >= second["age_s"] >= 0
            assert set(first) == {"request_id", "worker", "position", "age_s"}
            health = await made.open_ask("GET", "/health")
            assert "queue" not in health.json, "nobody is told whose request is where"
            assert b"secret" not in health.content
            (worker,) = health.json["workers"]
            assert (worker["running"], worker["waiting"], worker["wait_s"]) == (1, 2, 3.0)
            ids = [row[0] for row in await asyncio.gather(*asking)]
            assert {first["request_id"], second["request_id"]} < set(ids)

    run(body)


def test_with_several_keys_each_is_told_of_its_own_requests_only() -> None:
    async def body() -> None:
        async with front(1, PROXY_API_KEYS="other") as made:
            content = body_of("/v1/responses", "n=9 delay=0.2")
            asking = [
                asyncio.create_task(made.open_ask("POST", "/v1/responses", key, body=content))
                for key in (KEY, KEY, OTHER_KEY, OTHER_KEY)
            ]
            theirs = await waiting(made, 2, OTHER_KEY)
            mine = await waiting(made, 1, KEY)
            positions = sorted(row["position"] for row in [*mine, *theirs])
            assert positions == [1, 2, 3], "the others' are counted, not told"
            replies = await asyncio.gather(*asking)
            own = {reply.headers["x-request-id"] for reply in replies[2:]}
            assert {row["request_id"] for row in theirs} <= own

    run(body)

"""No memory of the proxy serves one API key's client with what another's has said."""

from typing import Any

import orjson
import pytest

from tests.helpers.memory_spies import Spies
from tests.helpers.proxy.app_over_workers import Front, front
from tests.helpers.proxy.proxy_app import Reply

pytestmark = pytest.mark.process

MINE, THEIRS = (b"x-api-key", b"mine"), (b"x-api-key", b"theirs")
QUESTION = "Today's date: 2026-11-23\nthe code is swordfish 7731"
SERVING = {"CacheAffinity.worker_ids", "MemoryByOwner._values", "ResponseStore._entries"}


async def asked(served: Front, key: tuple[bytes, bytes], **more: Any) -> Reply:
    body = {"model": "claude-x", "input": QUESTION, "session_id": "one", **more}
    return await served.ask_as(key, "POST", "/v1/responses", orjson.dumps(body))


async def talk(served: Front, spies: Spies, key: tuple[bytes, bytes]) -> str:
    """Ask, ask again, go on, and look at what is told; return the id of a response."""
    spies.who = key[1].decode()
    first = (await asked(served, key)).json["id"]
    assert (await asked(served, key, previous_response_id=first)).status == 200
    for path in (f"/v1/responses/{first}", "/v1/cache", "/v1/sessions", "/health"):
        assert (await served.ask_as(key, "GET", path)).status == 200
    return str(first)


async def test_a_probe_finds_nothing_in_any_memory_of_what_another_key_has_said() -> None:
    async with front(1, PROXY_API_KEY="", PROXY_API_KEYS="mine, theirs") as served:
        spies = Spies(served.app, served.made.pool)
        response_id = await talk(served, spies, MINE)
        await talk(served, spies, THEIRS)
        path = f"/v1/responses/{response_id}"
        tried = [await served.ask_as(THEIRS, method, path) for method in ("GET", "DELETE")]
        tried.append(await asked(served, THEIRS, previous_response_id=response_id))
    assert spies.crossed() == {}
    assert [reply.status for reply in tried] == [404, 404, 404]
    assert spies.own("mine") >= SERVING, "each serves the one who has said it"

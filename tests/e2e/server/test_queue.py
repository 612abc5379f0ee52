"""A queue that is full: a real worker behind the real proxy."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx
import pytest

from tests.helpers.clients.run_clients import MODEL
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.worker_processes.scripted_worker import SMALL_TALK

QUEUE_MAX = 9
ASKED = 14
CHUNK_S = 60.0  # until a flood has been refused: then nobody waits any longer


@pytest.fixture(scope="module")
def narrow() -> Iterator[ScriptedServer]:
    """One slot, and a short queue."""
    with ScriptedServer(LIVE_SLOTS_MAX="1", QUEUE_MAX=str(QUEUE_MAX)) as running:
        yield running


def ask(server: ScriptedServer, path: str, text: str) -> httpx.Response:
    message = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": MODEL, "messages": message, "max_tokens": 99}
    return httpx.post(server.url + path, json=body, timeout=60)


def flood(server: ScriptedServer, path: str) -> list[httpx.Response]:
    """Ask more than the queue holds, while the first one's prompt is prefilled."""
    with ThreadPoolExecutor(ASKED) as pool:
        server.pause(CHUNK_S)
        asked = [pool.submit(ask, server, path, f"{path} {number}.") for number in range(ASKED)]
        any(each.result().status_code == 503 for each in as_completed(asked))
        server.pause(0)
        return [each.result() for each in asked]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_flood_past_the_queue_is_told_when_to_come_back_and_the_rest_is_served(
    narrow: ScriptedServer, path: str
) -> None:
    replies = flood(narrow, path)
    served = [reply.text for reply in replies if reply.status_code == 200]
    refused = [reply for reply in replies if reply.status_code == 503]
    assert len(served) + len(refused) == ASKED and len(served) >= 1 + QUEUE_MAX and refused
    assert all(json.dumps(SMALL_TALK)[1:-1] in text for text in served)
    for reply in refused:
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        error = reply.json()["error"]
        assert f"it takes {1 + QUEUE_MAX}" in error["message"] and "QUEUE_MAX" in error["message"]
        kind = "overloaded_error" if path == "/v1/messages" else "overloaded"
        assert kind in (error.get("type"), error.get("code"))
    narrow.wait_until_idle()
    assert ask(narrow, path, "After it.").status_code == 200

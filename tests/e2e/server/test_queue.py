"""A queue that is full, and one that is shared: a real worker behind the real proxy."""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import httpx
import pytest

from tests.helpers.clients.run_clients import MODEL
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.worker_processes.scripted_worker import SMALL_TALK

QUEUE_MAX = 9
ASKED = 14
CHUNK_S = 3.0  # long enough that a flood arrives while the first one's prompt is prefilled
LONE_CHUNK_S = 0.3  # long enough that one more request arrives before all others had their turn


@pytest.fixture(scope="module")
def narrow() -> Iterator[ScriptedServer]:
    """One slot, and a short queue."""
    with ScriptedServer(LIVE_SLOTS_MAX="1", QUEUE_MAX=str(QUEUE_MAX)) as running:
        yield running


def ask(server: ScriptedServer, path: str, text: str, session: str = "") -> httpx.Response:
    message = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": MODEL, "messages": message, "max_tokens": 99}
    headers = {"x-session-id": session} if session else {}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


@contextlib.contextmanager
def slowly(server: ScriptedServer) -> Iterator[None]:
    """Have the model take its time over what it begins meanwhile."""
    server.pause(CHUNK_S)
    try:
        yield
    finally:
        server.pause(0)


def flood(server: ScriptedServer, path: str, name: str) -> list[httpx.Response]:
    with ThreadPoolExecutor(ASKED) as pool:
        with slowly(server):
            asked = [pool.submit(ask, server, path, f"{name} {number}.") for number in range(ASKED)]
            any(each.result().status_code == 503 for each in as_completed(asked))
        return [each.result() for each in asked]


def waiting(server: ScriptedServer, count: int, asked: Sequence[Future[httpx.Response]]) -> Any:
    """Return /health once so many wait."""
    while len((health := server.health()).get("queue", [])) < count:
        assert not all(each.done() for each in asked), "the queue was never told"
        time.sleep(0.05)
    return health


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_flood_past_the_queue_is_told_when_to_come_back_and_the_rest_is_served(
    narrow: ScriptedServer, path: str
) -> None:
    replies = flood(narrow, path, path)
    served = [reply for reply in replies if reply.status_code == 200]
    refused = [reply for reply in replies if reply.status_code == 503]
    assert len(served) + len(refused) == ASKED
    assert len(served) >= 1 + QUEUE_MAX
    assert refused
    assert all(SMALL_TALK in json.dumps(reply.json(), ensure_ascii=False) for reply in served)
    for reply in refused:
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        error = reply.json()["error"]
        assert f"it takes {1 + QUEUE_MAX}" in error["message"]
        assert "QUEUE_MAX" in error["message"]
        if path == "/v1/messages":
            assert error["type"] == "overloaded_error"
        else:
            assert error["code"] == "overloaded"
    narrow.wait_until_idle()
    assert ask(narrow, path, "After it.").status_code == 200


def test_health_tells_who_waits_at_which_place_and_for_how_long(narrow: ScriptedServer) -> None:
    with ThreadPoolExecutor(ASKED) as pool:
        with slowly(narrow):
            texts = [f"Who? {number}." for number in range(QUEUE_MAX)]
            asked = [pool.submit(ask, narrow, "/v1/chat/completions", text) for text in texts]
            health = waiting(narrow, 2, asked)
        assert all(each.result().status_code == 200 for each in asked)
    (worker,) = health["workers"]
    assert worker["waiting"] >= 2 and worker["wait_s"] > 0
    places = [row["position"] for row in health["queue"]]
    assert places == sorted(set(places)) and places[0] >= 1
    assert all(row["age_s"] >= 0 and row["worker"] == 0 for row in health["queue"])
    narrow.wait_until_idle()
    health = narrow.health()
    assert (health["queue"], health["workers"][0]["wait_s"]) == ([], 0)


def test_a_session_beside_anothers_queue_has_a_slot_soon(narrow: ScriptedServer) -> None:
    """What counts is the order in which the model began to answer."""
    path, before = "/v1/chat/completions", len(narrow.asked())
    with ThreadPoolExecutor(ASKED) as pool:
        with slowly(narrow):
            texts = [f"Flood {number}." for number in range(QUEUE_MAX)]
            asked = [pool.submit(ask, narrow, path, text, "flood") for text in texts]
            waiting(narrow, QUEUE_MAX // 2, asked)
            begun = len(narrow.asked()) - before
        narrow.pause(LONE_CHUNK_S)
        asked.append(pool.submit(ask, narrow, path, "Alone.", "lone"))
        assert all(each.result().status_code == 200 for each in asked)
    sessions = [row.session for row in narrow.asked()[before:]]
    assert sorted(sessions) == ["flood"] * QUEUE_MAX + ["lone"]
    print(f"the lone request was answered as number {sessions.index('lone') + 1}, after {begun}")
    on_its_way = 2  # that begin while it is rendered
    assert sessions.index("lone") <= begun + 2 + on_its_way < QUEUE_MAX

"""Checks the cache routes over scripted workers: real processes, real ZeroMQ, no LiteLLM."""

import asyncio
import os
import signal
from pathlib import Path
from unittest import mock

import pytest

from hearth.proxy.pool.worker_pool import WorkerPool
from tests.helpers.proxy.app_over_workers import DEBUG, KEY, front
from tests.helpers.proxy.fake_worker_pool import request
from tests.helpers.proxy.proxy_app import app_of, ask

pytestmark = pytest.mark.process


async def test_each_worker_tells_about_its_cache_and_empties_it() -> None:
    async with front() as made:
        _, size = await made.generate("n=1 a b c")
        assert await made.workers() == [
            {"worker": 0, "bytes": size, "entries": [{"tokens": size, "bytes": size}]},
            {"worker": 1, "bytes": 0, "entries": []},
        ]
        empty = [{"worker": number, "bytes": 0, "entries": []} for number in (0, 1)]
        assert await made.workers("DELETE") == empty
        assert await made.workers() == empty
        whats = [row["what"] for row in made.made.events("Status")]
        assert sorted(whats) == ["cache"] * 4 + ["clear_cache"] * 2


async def test_a_worker_that_hangs_is_an_error_in_its_row_and_two_are_waited_for_at_once(
    impatient: None,
) -> None:
    async with front(3) as made:
        made.stop(0)
        made.stop(2)
        links = made.made.pool.links.values()
        asking = asyncio.create_task(made.workers())
        await made.made.until(lambda: [link.load for link in links] == [1, 0, 1])
        rows = await asking
        assert [set(row) for row in rows[::2]] == [{"worker", "error"}] * 2
        assert "within 2 s" in rows[0]["error"]
        assert rows[1] == {"worker": 1, "bytes": 0, "entries": []}
        assert not any(link.load for link in links)


async def test_a_worker_that_dies_while_it_is_asked_is_an_error_at_once() -> None:
    async with front() as made:
        made.stop(1)
        asking = asyncio.create_task(made.workers("DELETE"))
        await asyncio.sleep(0.1)
        os.kill(made.made.supervisor.pids[1], signal.SIGKILL)
        rows = await asyncio.wait_for(asking, 60)
        assert "error" not in rows[0]
        assert "SIGKILL" in rows[1]["error"]


def test_a_cache_that_no_worker_can_empty_is_not_said_to_be_empty(tmp_path: Path) -> None:
    reply = ask(app_of(tmp_path), "DELETE", "/v1/cache")
    assert (reply.status, reply.json["error"]["code"]) == (503, "overloaded")
    assert "Nothing was emptied: no worker is ready." in reply.json["error"]["message"]


async def test_a_prompt_is_found_by_the_id_that_the_client_was_told() -> None:
    async with front() as made:
        held = await made.made.pool.open(request("n=1000 delay=0.02"), "held")
        request_id, size = await made.generate("n=1 a b c d e")  # by the worker that is free
        held.close()
        submits = made.made.events("Submit")
        assert [row["request_id"] for row in submits] == ["held", request_id]
        assert submits[0]["pid"] != submits[1]["pid"]
        reply = await made.prompt(request_id)
        assert reply.status == 200
        assert reply.json == {"request_id": request_id, "ids": list(range(size))}


async def test_a_prompt_that_nobody_remembers_is_a_404(impatient: None) -> None:
    async with front() as made:
        reply = await made.prompt("nobody's")
        assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")
        made.stop(1)  # which may know
        reply = await made.prompt("nobody's")
        assert (reply.status, reply.json["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in reply.headers


def test_prompts_are_served_only_where_that_is_switched_on(tmp_path: Path) -> None:
    shut, opened = app_of(tmp_path, PROXY_API_KEY="k"), app_of(tmp_path, **DEBUG)
    path = "/v1/cache/prompts/abc"
    for method in ("GET", "POST", "DELETE"):
        reply = ask(shut, method, path, KEY)
        assert reply.status == 404
        assert "not served here" in reply.json["error"]["message"]
    assert "not served here" not in ask(opened, "GET", path, KEY).json["error"]["message"]
    assert ask(opened, "GET", "/v1/cache/prompts/", KEY).status == 404
    assert ask(opened, "GET", "/v1/cache/other", KEY).status == 404
    head = ask(opened, "HEAD", "/v1/cache", KEY)
    assert (head.status, head.content) == (200, b"")


def test_the_checks_are_told_of_and_asked_for_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = app_of(tmp_path, **DEBUG)
    asked = mock.AsyncMock(return_value={0: {"state": "waiting"}})
    monkeypatch.setattr(WorkerPool, "ask", asked)
    for method, what in (("GET", "doctor"), ("POST", "check_again")):
        assert ask(edge, method, "/v1/doctor").status == 401
        told = ask(edge, method, "/v1/doctor", KEY)
        assert (told.status, asked.call_args.args[0]) == (200, what)
    assert asked.call_count == 2

"""Checks the session and message names that workers get, and the sessions that they report.

Over scripted workers: real processes, real ZeroMQ, no LiteLLM.
"""

import contextlib
import os
import signal
from typing import Any

import orjson
import pytest

from tests.helpers.proxy.app_over_workers import Front, front
from tests.helpers.proxy.fake_worker_pool import request as request_of

pytestmark = pytest.mark.process

REMINDER = "<system-reminder>\nToday's date is 2026-11-21.\n</system-reminder>"


def thread(name: str) -> tuple[bytes, bytes]:
    return (b"thread-id", name.encode())


async def respond(made: Front, session: str, *words: str) -> int:
    """Send a conversation of `words`, and return the process id of the worker that answered."""
    rows = [{"role": "user", "content": word} for word in words]
    body = orjson.dumps({"model": "claude-x", "input": rows})
    reply = await made.ask("POST", "/v1/responses", thread(session), body=body)
    assert reply.status == 200, reply.content
    pid: int = made.made.events("Submit")[-1]["pid"]
    return pid


async def count(made: Front, **body: Any) -> dict[str, Any]:
    """Have a prompt counted, and return it as the worker got it."""
    asked = orjson.dumps({"model": "claude-x", **body})
    reply = await made.ask("POST", "/v1/messages/count_tokens", thread("t"), body=asked)
    assert reply.status == 200, reply.content
    prompt: dict[str, Any] = made.made.events("Count")[-1]["prompt"]
    return prompt


async def test_a_worker_is_told_who_speaks_and_what_each_message_is_known_by() -> None:
    async with front(1) as made:
        await respond(made, "s", "n=1", REMINDER, "n=1")
        prompt = made.made.events("Submit")[0]["prompt"]
        assert prompt["speaker"] == {
            "key": "",  # there is one: what is kept is everybody's
            "session": "s",
            "agent": "",
            "parent": "",
            **{"client": "", "client_name": "", "conversation": "", "title": "n=1"},
        }
        first, second, third = prompt["names"]
        assert first == third | {"link": first["link"]}
        assert first["link"] == second["link"] != third["link"]
        assert (len(first["canonical"]), first["rules"]) == (32, [])
        assert (second["canonical"], second["rules"]) == ("", ["system_reminder"])
        assert prompt["delta_chars"] == len(REMINDER)
        assert prompt["messages"][1]["content"] == REMINDER


async def test_a_prompt_that_is_counted_is_named_too_and_settings_decide_how() -> None:
    rows = [{"role": "user", "content": text} for text in ("x" * 80, REMINDER)]
    async with front(1) as made:
        prompt = await count(made, messages=rows)
        assert prompt["speaker"]["session"] == "t"
        assert prompt["names"][1]["canonical"] == ""
    for setting in (
        {"CACHE_CANONICALIZE_TOOL_CONTEXT": "false"},
        {"CACHE_NORM_SAFETY_CHECK": "true"},
    ):
        async with front(1, **setting) as made:
            name = (await count(made, messages=rows))["names"][1]
            assert name["canonical"] == name["exact"] != ""


async def test_a_conversation_stays_with_its_worker_until_that_is_gone() -> None:
    async with front(2) as made:
        with contextlib.ExitStack() as held:
            answer = await made.made.pool.open(request_of("n=1000 delay=0.02"), "held")
            held.callback(answer.close)  # worker 0 is the busier one from here on
            other = await respond(made, "b", "shared", "n=1")
            busy = made.made.events("Submit")[0]["pid"]
            assert other != busy
        again = [await respond(made, "b", "shared", "n=1", REMINDER, "n=1") for _ in range(2)]
        assert again == [other, other]
        assert await respond(made, "c", "shared", "n=1") == other, "it shares a prefix"
        assert await respond(made, "b", "anew n=1") == other, "it is the session's"
        assert await respond(made, "d", "anew too n=1") == busy, "the least id of idle ones"
        os.kill(other, signal.SIGKILL)
        await made.made.until(lambda: made.made.supervisor.workers[1].restarts == 1)
        await made.made.until(lambda: made.made.ready_count() == 2)
        assert await respond(made, "b", "shared", "n=1") == busy, "its cache is gone"


async def test_all_workers_tell_of_their_sessions_and_each_row_says_whose_it_is() -> None:
    async with front(2) as made:
        answer = await made.made.pool.open(request_of("n=1000 delay=0.02"), "held")
        await respond(made, "a b/c", "n=1 of one")
        answer.close()
        await respond(made, "d", "n=1 of another")
        reply = await made.ask("GET", "/v1/sessions")
        assert reply.status == 200
        rows = {row.pop("session"): row for row in reply.json["sessions"]}
        assert rows["a b/c"] == {"client": "", "lines": 1, "worker": 1}
        assert rows["d"] == {"client": "", "lines": 1, "worker": 0}
        assert (reply.json["object"], reply.json["errors"]) == ("list", [])
        recent = reply.json["recent"]
        assert [row["session"] for row in recent] == ["d", "a b/c"], "newest first"
        reply = await made.ask("GET", "/v1/sessions/a b/c")
        assert reply.status == 200
        assert reply.json["session"] == "a b/c"
        (line,) = reply.json["lines"]
        assert line["worker"] == 1
        assert line["request_id"] == made.made.events("Submit")[1]["request_id"]


async def test_the_lines_of_a_session_on_two_workers_are_told_together() -> None:
    async with front(2) as made:
        first = await respond(made, "s", "n=1")
        number = made.made.supervisor.pids.index(first)
        made.made.pool.affinity.forget(number)
        answer = await made.made.pool.open(request_of("n=1000 delay=0.02"), "held")
        assert await respond(made, "s", "n=1") != first
        answer.close()
        lines = (await made.ask("GET", "/v1/sessions/s")).json["lines"]
        assert sorted(line["worker"] for line in lines) == [0, 1]


async def test_a_session_that_nobody_knows_is_a_404_unless_one_may_know_it(impatient: None) -> None:
    async with front(2) as made:
        reply = await made.ask("GET", "/v1/sessions/nobody")
        assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")
        assert "'nobody'" in reply.json["error"]["message"]
        made.stop(1)
        reply = await made.ask("GET", "/v1/sessions/nobody")
        assert (reply.status, reply.json["error"]["code"]) == (503, "overloaded")
        assert "within 2 s" in reply.json["error"]["message"]
        reply = await made.ask("GET", "/v1/sessions")
        assert [row["worker"] for row in reply.json["errors"]] == [1]
        assert "within 2 s" in reply.json["errors"][0]["error"]


async def test_a_session_that_an_unloaded_worker_may_know_is_no_404() -> None:
    async with front(2) as made:
        await respond(made, "mine", "n=1")
        made.made.supervisor.move(made.made.supervisor.workers[1], None)
        await made.made.until(lambda: made.made.supervisor.workers[1].state == "unloaded")
        assert (await made.ask("GET", "/v1/sessions/mine")).status == 200
        reply = await made.ask("GET", "/v1/sessions/nobody")
        assert (reply.status, reply.json["error"]["code"]) == (503, "overloaded")
        assert "one that is not may know it" in reply.json["error"]["message"]
        (row,) = (await made.ask("GET", "/v1/sessions")).json["errors"]
        assert (row["worker"], row["state"]) == (1, "unloaded")
        assert "the next request loads its model" in row["error"]

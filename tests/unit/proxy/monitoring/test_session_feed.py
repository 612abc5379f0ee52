"""Watch: the lines of sessions, which are asked of the workers where they changed."""

import pytest

from hearth.proxy.monitoring import worker_poller as poller_module
from hearth.shared.errors import Overloaded
from tests.helpers.proxy.feed_events import SESSION, Workers, feed_of, read_until, run, snapshot_of

pytestmark = pytest.mark.usefixtures("quick")


def test_a_sessions_lines_are_asked_for_again_only_after_it_went_on() -> None:
    async def body() -> None:
        workers = Workers()
        feed = feed_of(workers)
        with feed.listening("") as events:
            (session,) = (await read_until(events, "sessions"))["sessions"]
            for _ in range(3):
                await read_until(events, "state")
            assert workers.count("tree") == 1
            workers.sessions[0]["turns"] = 2
            await read_until(events, "sessions")
            assert workers.count("tree") == 2
            await events.aclose()
        (line,) = session["lines"]
        assert (session["session"], line["line"], line["worker"]) == ("s", 1, 0)
        assert len(line["requests"]) == 99
        turn = line["requests"][0]
        assert turn["divergence"]["cause"] == "message edited"
        assert not {"was", "now"} & turn["divergence"].keys()

    run(body)


def test_only_the_lines_of_sessions_that_changed_are_sent_again() -> None:
    async def body() -> None:
        workers = Workers()
        workers.sessions = [SESSION | {"session": name, "idle_s": 1.0} for name in ("a", "b")]
        feed = feed_of(workers)
        with feed.listening("") as events:
            first = await read_until(events, "sessions")
            workers.sessions[1] |= {"turns": 2, "idle_s": 0.0}
            second = await read_until(events, "sessions")
            workers.sessions[0] |= {"idle_s": -1.0}
            third = await read_until(events, "sessions")
            await events.aclose()
        told = [
            (event["order"], [row["session"] for row in event["sessions"]])
            for event in (first, second, third)
        ]
        assert told == [
            (["a", "b"], ["a", "b"]),
            (["b", "a"], ["b"]),
            (["a", "b"], []),
        ]

    run(body)


def test_a_worker_that_could_not_tell_its_lines_is_asked_again() -> None:
    async def body() -> None:
        workers = Workers()
        workers.failure = Overloaded("It is busy.")
        feed = feed_of(workers)
        with feed.listening("") as events:
            (session,) = (await read_until(events, "sessions"))["sessions"]
            assert session["lines"] == []
            workers.failure = None
            while not session["lines"]:
                (session,) = (await read_until(events, "sessions"))["sessions"]
            await events.aclose()

    run(body)


def test_what_a_busy_worker_told_of_its_sessions_is_shown_until_it_can_tell_again() -> None:
    async def body() -> None:
        workers = Workers()
        feed = feed_of(workers)
        with feed.listening("") as events:
            (session,) = (await read_until(events, "sessions"))["sessions"]
            workers.failure, workers.sessions[0]["turns"] = Overloaded("It is busy."), 2
            for is_listed in (True, False, True):
                workers.is_listing = is_listed
                for _ in range(3):
                    await read_until(events, "state")
                (kept,) = (await snapshot_of(feed))["sessions"]
                assert kept == session and kept["lines"]
            asked = workers.count("tree")
            await read_until(events, "state")
            assert workers.count("tree") > asked
            workers.failure, workers.sessions = None, []
            while (await read_until(events, "sessions"))["order"]:
                pass
            await events.aclose()

    run(body)


def test_the_sessions_used_last_are_told_and_no_more_than_fit() -> None:
    async def body() -> None:
        workers = Workers()
        workers.sessions = [SESSION | {"session": f"s{n}", "idle_s": 99.0 - n} for n in range(40)]
        feed = feed_of(workers)
        with feed.listening("") as events:
            told = (await read_until(events, "sessions"))["sessions"]
            await events.aclose()
        shown = poller_module.SESSIONS_MAX
        assert [row["session"] for row in told] == [f"s{39 - n}" for n in range(shown)]
        assert workers.count("tree") == shown

    run(body)

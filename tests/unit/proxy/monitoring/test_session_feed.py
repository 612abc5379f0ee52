"""Watch: the lines of sessions, which are asked of the workers where they changed."""

import pytest

from hearth.shared.errors import Overloaded
from tests.helpers.proxy.feed_events import SESSION, Workers, feed_of, read_until, snapshot_of

pytestmark = pytest.mark.usefixtures("quick")


async def test_a_sessions_lines_are_asked_for_again_only_after_it_went_on() -> None:
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


async def test_what_a_busy_worker_told_of_its_sessions_is_shown_until_it_can_tell_again() -> None:
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


async def test_only_the_lines_of_sessions_that_changed_are_sent_again() -> None:
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

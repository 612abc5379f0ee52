"""Checks the dashboard's feed: its requests and sums, its listeners, its questions to workers."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.monitoring import dashboard as poller_module, recent_requests
from hearth.proxy.monitoring.dashboard import LISTENERS_MAX, DashboardFeed
from hearth.proxy.monitoring.recent_requests import REQUESTS_MAX
from hearth.shared.errors import Overloaded
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Usage
from tests.helpers.proxy.feed_events import (
    DRAFTS,
    USAGE,
    Workers,
    ended,
    feed_of,
    read,
    read_until,
    request_of,
    snapshot_of,
)

pytestmark = pytest.mark.usefixtures("quick")


def note(feed: DashboardFeed, usage: Usage | None = USAGE, key: str = "") -> None:
    feed.requests.record(request_of(key=key), [ended(usage, key)], awake_s())


# ---------------------------------------------------------------- requests


@given(
    st.lists(
        st.none() | st.tuples(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 300)),
        max_size=30,
    )
)
def test_the_last_requests_are_kept_and_the_sums_are_of_all(rows: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent_requests, "REQUESTS_MAX", 12)
        feed = feed_of()
        for row in rows:
            cached, prefilled, completion = row or (0, 0, 0)
            usage = Usage(cached + prefilled, cached, prefilled, completion, ttft_ms=10)
            note(feed, None if row is None else usage)
    told = asyncio.run(snapshot_of(feed))
    told_rows, totals = told["requests"], told["totals"]
    assert len(told_rows) == min(len(rows), 12)
    numbers = [row["number"] for row in told_rows]
    assert numbers == list(range(len(rows) - len(told_rows) + 1, len(rows) + 1))
    whole = [row for row in rows if row is not None]
    assert totals["requests"] == len(rows)
    assert totals["cached_tokens"] == sum(row[0] for row in whole)
    assert totals["prefilled_tokens"] == sum(row[1] for row in whole)
    assert totals["completion_tokens"] == sum(row[2] for row in whole)
    prompt = totals["prompt_tokens"]
    assert prompt == totals["cached_tokens"] + totals["prefilled_tokens"]
    assert totals["hit_rate"] == (totals["cached_tokens"] / prompt if prompt else None)


# ---------------------------------------------------------------- listeners


@given(st.lists(st.sampled_from(["note", "first", "second"]), max_size=40))
def test_each_listener_is_told_each_request_once_however_slowly_it_reads(steps: list[str]) -> None:
    async def body() -> None:
        feed, told = feed_of(), {"first": list[int](), "second": list[int]()}
        with feed.listening("") as first, feed.listening("") as second:
            events = {"first": first, "second": second}
            for each in events.values():
                await read(each)
            noted = 0
            for step in steps:
                if step == "note":
                    note(feed)
                    noted += 1
                elif len(told[step]) < noted:
                    rows = (await read_until(events[step], "requests"))["requests"]
                    told[step] += [row["number"] for row in rows]
            for name, each in events.items():
                while len(told[name]) < noted:
                    rows = (await read_until(each, "requests"))["requests"]
                    told[name] += [row["number"] for row in rows]
                await each.aclose()
        assert told["first"] == told["second"] == list(range(1, noted + 1))

    asyncio.run(body())


async def test_a_listener_that_fell_behind_is_told_what_is_left_and_the_right_sums() -> None:
    feed = feed_of()
    with feed.listening("") as events:
        await read(events)
        for _ in range(REQUESTS_MAX + 50):
            note(feed)
        told = await read_until(events, "requests")
        await events.aclose()
    numbers = [row["number"] for row in told["requests"]]
    assert numbers == list(range(51, REQUESTS_MAX + 51))
    assert told["totals"]["requests"] == REQUESTS_MAX + 50


async def test_a_request_is_told_at_its_end_and_not_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poller_module, "POLL_S", 3600.0)

    feed = feed_of()
    with feed.listening("") as events:
        await read_until(events, "sessions")
        waiting = asyncio.create_task(read(events))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        note(feed)
        assert (await waiting)["type"] == "requests"
        await events.aclose()


async def test_workers_are_asked_only_while_somebody_listens() -> None:
    workers = Workers()
    feed = feed_of(workers)
    note(feed)
    await asyncio.sleep(0.02)
    assert workers.asked == []
    with feed.listening("") as events:
        snapshot = await read(events)
        assert [row["id"] for row in snapshot["state"]["workers"]] == [0]
        state = (await read_until(events, "state"))["state"]
        await events.aclose()
    (row,) = state["workers"]
    cache = {"bytes": 5, "budget_bytes": 10, "memory_limit_bytes": 99, "busy_slots": 1}
    assert row["cache"] == cache | {"speculation": DRAFTS}
    assert state["entries"][0]["tokens"] == 90
    assert state["held"] == 245, "of which the worker tells the last used"
    assert state["sessions"] == {"Pi 1.2": 1}
    await asyncio.sleep(0)
    count = len(workers.asked)
    await asyncio.sleep(0.02)
    assert len(workers.asked) == count


async def test_a_closing_server_ends_every_stream() -> None:
    feed = feed_of()
    with feed.listening("") as events:
        await read(events)
        feed.close()
        async with asyncio.timeout(60):
            rest = [frame async for frame in events]
    assert all(b"event: snapshot" not in frame for frame in rest)


async def test_one_listener_too_many_is_refused_until_another_leaves() -> None:
    feed = feed_of()
    open_pages = [feed.listening("") for _ in range(LISTENERS_MAX)]
    for page in open_pages:
        page.__enter__()
    with pytest.raises(Overloaded, match=f"{LISTENERS_MAX} pages"), feed.listening(""):
        pass
    open_pages[0].__exit__(None, None, None)
    with feed.listening("") as events:
        assert (await read(events))["type"] == "snapshot"
        await events.aclose()
    for page in open_pages[1:]:
        page.__exit__(None, None, None)
    assert feed.listeners == 0


# ---------------------------------------------------------------- keys


async def test_with_several_keys_each_is_told_its_own_requests_only() -> None:
    workers = Workers()
    feed = feed_of(workers)
    for key in ("a", "b", "b"):
        note(feed, key=key)

    for key, count in (("a", 1), ("b", 2), ("c", 0)):
        with feed.listening(key) as events:
            told = await read(events)
            assert (len(told["requests"]), told["totals"]["requests"]) == (count, count)
            await read_until(events, "state")
            await events.aclose()
    assert {row[2] for row in workers.asked} == {"a", "b", "c"}

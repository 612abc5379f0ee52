"""Checks what each key is shown of its recent requests, their sums and running prefills."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from hearth.proxy.http.http_exchange import ClientGone
from hearth.proxy.monitoring.dashboard_feed import DashboardFeed
from hearth.proxy.monitoring.recent_requests import RECENT_MAX
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Admitted, Delta, Progress, Usage
from hearth.worker.sessions.session_report import TREE_LINE_ROWS_MAX, TREE_LINES_MAX, TREE_ROWS_MAX
from tests.helpers.proxy.app_over_workers import KEY, Front, front
from tests.helpers.proxy.fake_worker_pool import run
from tests.helpers.proxy.feed_events import USAGE, ended, feed_of, request_of
from tests.helpers.proxy.request_bodies import OTHER_KEY, body_of
from tests.helpers.worker.session_prompts import QUESTION, WORDS, Desk, echo

# ---------------------------------------------------------------- the last requests


def asked(feed: DashboardFeed, session: str, key: str = "", usage: Usage | None = USAGE) -> None:
    feed.requests.note(request_of(session, key), [ended(usage, key)], awake_s())


def test_the_last_requests_are_told_newest_first_without_a_word_of_them() -> None:
    feed = feed_of()
    for session in ("a", "b", "c"):
        asked(feed, session)
    recent = feed.requests.recent("")
    assert [row["session"] for row in recent] == ["c", "b", "a"]
    told = [recent[0][name] for name in ("queue_ms", "ttft_ms", "finish_ms", "ended")]
    assert told == [50, 250, 400, "stop"]
    assert "the words" not in str(recent)


def test_only_so_many_are_told() -> None:
    feed = feed_of()
    for number in range(RECENT_MAX + 5):
        asked(feed, str(number))
    sessions = [row["session"] for row in feed.requests.recent("")]
    assert sessions == [str(number) for number in range(RECENT_MAX + 4, 4, -1)]


def test_each_key_is_told_of_its_own_requests_and_their_sums() -> None:
    feed = feed_of()
    asked(feed, "mine", "k")
    asked(feed, "theirs", "other")
    for key, session in (("k", "mine"), ("other", "theirs")):
        assert [row["session"] for row in feed.requests.recent(key)] == [session]
        assert feed.requests.totals(key)["requests"] == 1
    assert feed.requests.recent("nobody") == [] and feed.requests.totals("nobody")["requests"] == 0


def test_a_request_whose_client_left_is_among_them_and_says_so() -> None:
    feed = feed_of()
    asked(feed, "s", usage=None)
    asked(feed, "s")
    assert [row["ended"] for row in feed.requests.recent("")] == ["stop", "client_closed"]


def test_a_row_tells_how_its_prompt_matched_how_fast_it_was_written_and_its_images_time() -> None:
    feed = feed_of()
    written = replace(USAGE, completion_tokens=31, match="prefix", image_tokens=9, image_ms=20)
    asked(feed, "s", usage=written)
    asked(feed, "s")
    plain, row = feed.requests.recent("")
    assert (row["match"], row["decode_speed"], row["image_ms"]) == ("prefix", 200.0, 20)
    assert row["speed"] == round(100 / 0.18, 1), "of the time that neither queue nor encoder took"
    assert (plain["match"], plain["decode_speed"], plain["image_ms"]) == ("none", None, None)
    assert feed.requests.totals("")["decode_speed"] == 200.0


def test_a_row_and_the_sums_tell_what_came_of_drafts() -> None:
    feed = feed_of()
    fields = ("accepted_prediction_tokens", "rejected_prediction_tokens", "decode_forwards")
    drafted = replace(USAGE, completion_tokens=20, **dict(zip(fields, (12, 5, 8), strict=True)))
    assert feed.requests.totals("")["forwards_per_token"] is None
    asked(feed, "s", usage=drafted)
    asked(feed, "s", usage=replace(USAGE, completion_tokens=10, decode_forwards=10))
    asked(feed, "s", usage=None)
    names = ("accepted", "rejected", "forwards")
    rows = [[row[name] for name in names] for row in feed.requests.recent("")]
    assert rows == [[None] * 3, [0, 0, 10], [12, 5, 8]]
    totals = feed.requests.totals("")
    assert [totals[name] for name in fields] == [12, 5, 18]
    assert totals["forwards_per_token"] == 0.6


def test_matches_are_counted_and_averaged_over_the_prompts_that_had_a_slot() -> None:
    feed = feed_of()
    for cached, match in ((0, "miss"), (80, "prefix"), (40, "lcp"), (100, "prefix")):
        usage = replace(USAGE, cached_tokens=cached, prefilled_tokens=100 - cached, match=match)
        asked(feed, "s", usage=usage)
    asked(feed, "s", usage=replace(USAGE, prefilled_tokens=0))  # it left before it had a slot
    totals = feed.requests.totals("")
    found = {name: number for name, number in totals["matches"].items() if number}
    assert found == {"miss": 1, "prefix": 2, "lcp": 1, "none": 1}
    assert totals["match_share"] == pytest.approx(0.55) and totals["match_tokens"] == 55


def test_clients_that_left_are_counted_before_and_after_a_worker_had_taken_their_request() -> None:
    feed = feed_of()
    asked(feed, "s", "k", usage=None)
    asked(feed, "s", "k")
    feed.requests.refused(ClientGone(), "k")
    feed.requests.refused(RequestError("Too long.", status=400), "k")
    assert feed.requests.totals("k")["disconnects"] == 2
    assert feed.requests.totals("other")["disconnects"] == 0


@pytest.mark.process
def test_the_routes_tell_them_and_their_sums_over_all_workers_to_their_key() -> None:
    async def body() -> None:
        async with front(2, PROXY_API_KEYS="other") as made:
            content = body_of("/v1/responses", "n=2 three words")
            for key in (KEY, KEY, OTHER_KEY):
                await made.open_ask("POST", "/v1/responses", key, body=content)
            for key, count in ((KEY, 2), (OTHER_KEY, 1)):
                recent = (await made.open_ask("GET", "/v1/sessions", key)).json["recent"]
                totals = (await made.open_ask("GET", "/v1/cache", key)).json["totals"]
                assert len(recent) == totals["requests"] == count
                assert totals["prompt_tokens"] == sum(row["prompt"] for row in recent) > 0
                assert totals["completion_tokens"] == 2 * count

    run(body)


# ---------------------------------------------------------------- a session in brief


def test_in_brief_a_session_is_its_newest_lines_with_their_last_rows_and_no_more_than_fit() -> None:
    desk = Desk()
    for number in range(TREE_LINES_MAX + 2):
        for _ in range(TREE_LINE_ROWS_MAX + 1):
            desk.ask([{"role": "user", "content": f"conversation {number}"}], WORDS)
    whole, brief = desk.sessions.reports.session("s1"), desk.sessions.reports.brief("s1")
    assert whole is not None and brief is not None
    rows = {line["line"]: line["requests"] for line in whole["lines"]}
    told = {line["line"]: line["requests"] for line in brief["lines"]}
    assert len(rows) > TREE_LINES_MAX, "each conversation is a line, or more"
    assert list(told) == sorted(rows, reverse=True)[:TREE_LINES_MAX], "the last used first"
    assert sum(map(len, told.values())) <= TREE_ROWS_MAX
    for line, each in told.items():
        assert len(each) <= TREE_LINE_ROWS_MAX
        assert each == rows[line][len(rows[line]) - len(each) :]
    names = [{**line, "requests": None} for line in whole["lines"]]
    assert all({**line, "requests": None} in names for line in brief["lines"])


def test_a_line_that_is_old_and_still_used_is_told_in_brief() -> None:
    desk = Desk()
    main = [{"role": "user", "content": "the main one"}]
    desk.ask(main, WORDS)
    for number in range(TREE_LINES_MAX + 5):
        desk.ask([{"role": "user", "content": f"helper {number}"}], WORDS)
    desk.ask([*main, echo(WORDS), *QUESTION], WORDS)
    brief = desk.sessions.reports.brief("s1")
    assert brief is not None
    assert brief["lines"][0]["line"] == 1
    assert desk.sessions.reports.brief("s1", "another key") is None
    assert desk.sessions.reports.brief("none") is None


# ---------------------------------------------------------------- prompts that are being read


def test_a_prompt_is_being_read_from_its_first_chunk_to_the_first_word() -> None:
    answer = AnswerStream("r", lambda cancel: None)
    seen = [answer.is_prefilling]
    for message in (
        Admitted("r", 1000),
        Progress("r", 256, 1000),  # what is kept: it may wait for a slot yet
        Progress("r", 512, 1000),
        Progress("r", 999, 1000),
        Delta("r", 0, "content", "Hi"),
    ):
        answer.take(message)
        seen.append(answer.is_prefilling)
    assert seen == [False, False, False, True, True, False]
    told = answer.progress()
    assert told.pop("age_s") >= 0
    assert told == {
        "request_id": "r",
        "prompt_tokens": 1000,
        "cached_tokens": 256,
        "done_tokens": 999,
        **{"session": "anonymous", "client": "", "title": ""},
    }


async def reading(made: Front, count: int, *key: tuple[bytes, bytes]) -> list[dict[str, Any]]:
    """Return the prefills as /health tells them to `key`, once there are `count`."""
    while True:
        reply = await made.open_ask("GET", "/health", *key)
        rows: list[dict[str, Any]] = reply.json["prefills"]
        if len(rows) == count:
            return rows
        await asyncio.sleep(0.05)


@pytest.mark.process
def test_health_tells_each_key_how_far_its_own_prompts_are_and_others_nothing() -> None:
    async def body() -> None:
        async with front(1, PROXY_API_KEYS="other") as made:
            content = body_of("/v1/responses", "kept=0 n=1 delay=60 secret")
            asking = [
                asyncio.create_task(made.open_ask("POST", "/v1/responses", key, body=content))
                for key in (KEY, OTHER_KEY, OTHER_KEY)
            ]
            async with asyncio.timeout(60):
                (mine,) = await reading(made, 1, KEY)
                theirs = await reading(made, 2, OTHER_KEY)
            assert mine["request_id"] not in [row["request_id"] for row in theirs]
            assert (mine["worker"], mine["done_tokens"]) == (0, 2)
            assert 0 < mine["done_tokens"] < mine["prompt_tokens"]
            health = await made.open_ask("GET", "/health")
            assert "prefills" not in health.json and b"secret" not in health.content
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    run(body)

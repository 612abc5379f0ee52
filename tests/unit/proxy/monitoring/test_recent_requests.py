"""Checks what each key is shown of its recent requests, their sums and running prefills."""

from dataclasses import replace

import pytest

from hearth.proxy.http.http_exchange import ClientGone
from hearth.proxy.monitoring.dashboard_feed import DashboardFeed
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Admitted, Delta, Progress, Usage
from hearth.worker.sessions.session_report import TREE_LINE_ROWS_MAX, TREE_LINES_MAX, TREE_ROWS_MAX
from tests.helpers.proxy.feed_events import USAGE, ended, feed_of, request_of
from tests.helpers.worker.session_prompts import WORDS, Desk

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


# ---------------------------------------------------------------- a session in brief


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

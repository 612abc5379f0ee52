"""Checks what each key is shown of its recent requests, their sums and running prefills."""

from dataclasses import replace
from typing import Any

import pytest

from hearth.proxy.http.http_exchange import ClientGone
from hearth.proxy.monitoring.dashboard import DashboardFeed
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Admitted, Delta, Progress
from hearth.worker.sessions.session_manager import TREE_LINE_ROWS_MAX, TREE_LINES_MAX, TREE_ROWS_MAX
from tests.helpers.cases import cases
from tests.helpers.proxy.feed_events import LOSS, USAGE, ended, feed_of, request_of
from tests.helpers.worker.session_prompts import WORDS, Desk

# ---------------------------------------------------------------- the last requests


def asked(feed: DashboardFeed, row: dict[str, Any] | None) -> None:
    """Note a request of a table's row."""
    usage = None
    if row is not None:
        told = {"divergence": LOSS | row["divergence"]} if "divergence" in row else {}
        usage = replace(USAGE, **row | told)
    feed.requests.record(request_of("s"), [ended(usage)], awake_s())


@pytest.mark.parametrize("case", cases("proxy/recent_requests.yaml"))
def test_requests_and_their_sums_are_told_as_the_table_says_and_no_word_of_them(
    case: dict[str, Any],
) -> None:
    feed = feed_of()
    for row in case["requests"]:
        asked(feed, row)
    rows, totals = feed.requests.recent(""), feed.requests.totals("")
    if case["rows"]:
        assert [told | row for told, row in zip(rows, case["rows"], strict=True)] == rows
    for name, wanted in case["totals"].items():
        assert totals[name] == (pytest.approx(wanted) if type(wanted) is float else wanted), name
    assert "the words" not in str(rows) and LOSS["was"] not in str(rows)


def test_clients_that_left_are_counted_before_a_worker_had_taken_their_request_too() -> None:
    feed = feed_of()
    asked(feed, None)
    feed.requests.refused(ClientGone(), "")
    feed.requests.refused(RequestError("Too long.", status=400), "")
    assert feed.requests.totals("")["disconnects"] == 2
    assert feed.requests.totals("other")["disconnects"] == 0


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
        answer.receive(message)
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


# ---------------------------------------------------------------- a session in brief


def test_in_brief_a_session_is_its_newest_lines_with_their_last_rows_and_no_more_than_fit() -> None:
    desk = Desk()
    for number in range(TREE_LINES_MAX + 2):
        for _ in range(TREE_LINE_ROWS_MAX + 1):
            desk.ask([{"role": "user", "content": f"conversation {number}"}], WORDS)
    whole, brief = (
        desk.sessions.lines_report("s1"),
        desk.sessions.lines_report("s1", is_brief=True),
    )
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

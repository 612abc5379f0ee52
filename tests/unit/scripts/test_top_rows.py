"""Checks what `hearth top` shows of sessions, of speeds, and of requests that others answered."""

import io
from typing import Any

import pytest
from rich.console import Console

from hearth.commands.top_view import Limits, Row, Snapshot, limits_in, view

CLOUD: Row = {"requests": 3, "prompt_tokens": 41_200, "cached_tokens": 100}
CLOUD |= {"completion_tokens": 512, "cost": 0.0625}
ROW: Row = {
    **{"at": 1_700_000_000.0, "session": "s", "prompt": 41_200, "cached": 100, "prefilled": 0},
    **{"source": "none", "completion": 512, "queue_ms": None, "ttft_ms": 200, "finish_ms": None},
    **{"ended": "answered", "divergence": None, "cloud": True, "served_by": "openai/gpt-4o"},
}


SUMS: Row = {"requests": 4, "prompt_tokens": 100, "cached_tokens": 90, "prefilled_tokens": 10}
REQUEST: Row = {"session": "6f0c3a5e-claude", "prompt": 100, "cached": 90, "prefilled": 10}
SESSION: Row = {"session": "6f0c3a5e-claude", "turns": 31, "lost": 70, "decode_speed": 45.5}
PREFILL: Row = {"request_id": "f7ab", "prompt_tokens": 41_200, "done_tokens": 10_300}


def drawn(**told: Any) -> str:
    """Return what a terminal is sent, where the server told `told`."""
    snapshot = Snapshot("http://127.0.0.1:4000", **told)
    assert limits_in(60, snapshot).requests > 3
    console = Console(file=io.StringIO(), width=120)
    console.print(view(snapshot, Limits()))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def with_clouds(cloud: Row, *rows: Row) -> str:
    return drawn(
        cache={"workers": [], "totals": {"requests": 5, "cloud": cloud}},
        sessions={"recent": list(rows), "sessions": []},
    )


def test_what_others_answered_stands_apart_from_the_hit_rate() -> None:
    text = with_clouds(CLOUD, ROW)
    assert "hit rate - of 0 tokens in 5 requests\n" in text
    line = "elsewhere 3 requests: 41,200 tokens read (100 cached), 512 written, $0.0625"
    assert f"{line}\n" in text


def test_without_any_there_is_no_word_of_it() -> None:
    assert "elsewhere" not in with_clouds({"requests": 0})


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({}, "openai/gpt-4o"),
        ({"fallback": "hearth/a timeout"}, "openai/gpt-4o after hearth/a timeout"),
        ({"ended": "overloaded"}, "openai/gpt-4o overloaded"),
        (
            {"cloud": False, "served_by": "hearth/big", "fallback": "openai/gpt-4o timeout"},
            "hearth/big after openai/gpt-4o timeout",
        ),
    ],
)
def test_a_row_says_who_answered_and_after_whom(changed: Row, shown: str) -> None:
    text = with_clouds(CLOUD, ROW | {"fallback": ""} | changed)
    assert shown in text
    assert ("cloud" in text) == (changed.get("cloud") is not False)


def test_the_speeds_of_now_and_of_the_middle_are_told() -> None:
    sums = SUMS | {"decode_speed": 45.5, "speed": 812.0}
    worker = {"worker": 0, "answers_running": 2, "answers_tokens_per_s": 61.2}
    told = "61 decoded now, 2 answers, 46 decoded by an answer, 812 prefilled"
    assert f"\ntokens/s {told}\n" in drawn(cache={"workers": [worker], "totals": sums})
    assert "\ntokens/s -\n" in drawn(cache={"workers": [], "totals": SUMS})


def test_sessions_and_requests_are_called_by_the_first_words_asked() -> None:
    titled = SESSION | {"title": "Mend the test\x1b[31m", "client": "Pi 1.2"}
    text = drawn(sessions={"recent": [REQUEST], "sessions": [titled]})
    assert text.count("Mend the test?[31m") == 2 and "\x1b" not in text
    assert "6f0c3a5e" not in text and "Pi 1.2" in text
    untitled = drawn(sessions={"recent": [REQUEST], "sessions": [SESSION | {"agent": "helper"}]})
    assert "helper: 6f0c3a5e-claude" in untitled


def test_a_prefill_is_called_by_what_was_asked_or_else_by_its_request() -> None:
    text = drawn(health={"prefills": [PREFILL | {"title": "Mend the test"}, PREFILL]})
    assert "Mend the test" in text and "f7ab" in text

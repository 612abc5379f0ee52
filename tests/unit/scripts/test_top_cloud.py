"""Checks what `hearth top` shows of requests that others answered."""

import io

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


def drawn(cloud: Row, *rows: Row, width: int = 120) -> str:
    snapshot = Snapshot(
        "http://127.0.0.1:4000",
        health={"status": "ok", "workers": []},
        cache={"workers": [], "totals": {"requests": 5, "cloud": cloud}},
        sessions={"recent": list(rows), "sessions": []},
    )
    assert limits_in(60, snapshot).requests > 3
    console = Console(file=io.StringIO(), width=width)
    console.print(view(snapshot, Limits()))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_others_answered_stands_apart_from_the_hit_rate() -> None:
    text = drawn(CLOUD, ROW)
    assert "hit rate - of 0 tokens in 5 requests\n" in text
    line = "elsewhere 3 requests: 41,200 tokens read (100 cached), 512 written, $0.0625"
    assert f"{line}\n" in text


def test_without_any_there_is_no_word_of_it() -> None:
    assert "elsewhere" not in drawn({"requests": 0})


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
    text = drawn(CLOUD, ROW | {"fallback": ""} | changed)
    assert shown in text
    assert ("cloud" in text) == (changed.get("cloud") is not False)

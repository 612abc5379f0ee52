"""Checks how `hearth top` tells sessions and speeds."""

import io
from typing import Any, Final

from rich.console import Console

from hearth.commands.top_view import Limits, Snapshot, view

SUMS: Final = {"requests": 4, "prompt_tokens": 100, "cached_tokens": 90, "prefilled_tokens": 10}
REQUEST: Final = {"session": "6f0c3a5e-claude", "prompt": 100, "cached": 90, "prefilled": 10}
SESSION: Final = {"session": "6f0c3a5e-claude", "turns": 31, "lost": 70, "decode_speed": 45.5}
PREFILL: Final = {"request_id": "f7ab", "prompt_tokens": 41_200, "done_tokens": 10_300}


def drawn(width: int = 120, health: Any = None, cache: Any = None, sessions: Any = None) -> str:
    """Return what a terminal is sent."""
    console = Console(file=io.StringIO(), width=width)
    console.print(view(Snapshot("u", health or {}, cache or {}, sessions or {}), Limits()))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


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

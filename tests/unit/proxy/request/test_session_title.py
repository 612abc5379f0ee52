"""Checks that a conversation is called by what a person asked, not by what a client put before."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.request.session_title import TITLE_CHARS_MAX, title_of

REMINDER = "<system-reminder>\nThe date is today.\n</system-reminder>\n"


def asked(*contents: Any) -> list[dict[str, Any]]:
    system = {"role": "system", "content": "You help."}
    return [system, *({"role": "user", "content": content} for content in contents)]


CASES: dict[str, tuple[list[Any], str]] = {
    "plain words": (["Fix the test"], "Fix the test"),
    "the first line of them": (["\n  Fix   the test\n\nIt fails."], "Fix the test"),
    "Claude Code: reminders before": ([f"{REMINDER}{REMINDER}Fix it"], "Fix it"),
    "Claude Code: a message of reminders": ([REMINDER, "Fix it"], "Fix it"),
    "parts, one of them a reminder": (
        [[{"type": "text", "text": REMINDER}, {"type": "text", "text": "Fix it"}]],
        "Fix it",
    ),
    "an image beside the words": (
        [[{"type": "image", "image": "x"}, {"type": "text", "text": "What is it?"}]],
        "What is it?",
    ),
    "Claude Code: a command of its own": (
        [
            "<command-message>init is running</command-message>\n"
            "<command-name>/init</command-name>\n<command-args>fast</command-args>"
        ],
        "/init fast",
    ),
    "Codex: the environment": (
        ["<environment_context>\n <cwd>/home</cwd>\n</environment_context>", "Fix it"],
        "Fix it",
    ),
    "Codex: the project's instructions": (
        ["# AGENTS.md instructions for /home\n\n<INSTRUCTIONS>\nBe kind.\n</INSTRUCTIONS>\nFix it"],
        "Fix it",
    ),
    "Cline: the task in tags": (
        ["<task>\nFix it\n</task>\n<environment_details>\nA file\n</environment_details>"],
        "Fix it",
    ),
    "OpenClaw: when it was written": (
        ["[Sat 2026-11-21 10:03 UTC] Fix it\n\nRuntime: x"],
        "Fix it",
    ),
    "opencode: words in quotes": (['"Fix it"'], "Fix it"),
    "tags of the person's own": (["Why is <b>bold</b> text thin?"], "Why is text thin?"),
    "a tag that nothing closes": (["Is <br> closed?"], "Is <br> closed?"),
    "control characters": (["Fix\x1b[31m \u202eit\x00"], "Fix[31m it"),
    "no words": (["", "  \n", "?!", "---"], ""),
    "nobody asked": ([], ""),
}


@pytest.mark.parametrize("name", CASES)
def test_the_title_is_what_a_person_asked_first(name: str) -> None:
    contents, title = CASES[name]
    assert title_of(asked(*contents)) == title


def test_a_long_question_ends_in_whole_words() -> None:
    title = title_of(asked("word " * 100))
    assert title == "word " * 13 + "word…" and len(title) <= TITLE_CHARS_MAX
    assert title_of(asked("x" * 999)) == "x" * (TITLE_CHARS_MAX - 1) + "…"


@given(st.lists(st.text(alphabet="<>/ab \n-[]2026\"'\ud800\x1b", max_size=300), max_size=9))
def test_whatever_is_asked_gives_a_short_line_that_can_be_sent_and_printed(
    contents: list[str],
) -> None:
    title = title_of(asked(*contents))
    assert len(title) <= TITLE_CHARS_MAX and title.isprintable()
    assert title.encode() is not None, "no lone surrogate"

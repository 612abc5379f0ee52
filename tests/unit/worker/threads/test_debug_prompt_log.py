"""Checks which prompts LOG_PROMPTS remembers, and which keys may read them."""

import pytest

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt, Sampling, Speaker, Status, Submit
from hearth.worker.threads.prompt_thread import session_report
from hearth.worker.threads.request_builder import RECENT_MAX, RecentPrompts
from tests.helpers.worker.session_prompts import QUESTION, Desk

MINE = Speaker("mine", "s1")


def submit(name: str, use_kv_cache: bool = True) -> Submit:
    return Submit(name, Prompt([], speaker=MINE), Sampling(), use_kv_cache=use_kv_cache)


def test_a_prompt_is_found_by_its_own_key_and_by_whoever_may_see_all() -> None:
    recent = RecentPrompts(is_on=True)
    recent.add(submit("r1"), [1, 2, 3])
    assert [recent.ids_of("r1", key) for key in ("mine", "", "theirs")] == [[1, 2, 3]] * 2 + [None]
    assert recent.ids_of("other", "mine") is None


def test_nothing_is_remembered_unless_it_is_on_and_the_prompt_may_be_kept() -> None:
    recent, off = RecentPrompts(is_on=True), RecentPrompts(is_on=False)
    recent.add(submit("r1", use_kv_cache=False), [1])
    off.add(submit("r1"), [1])
    assert recent.ids_of("r1", "") is None and off.ids_of("r1", "") is None


def test_the_oldest_is_forgotten_first() -> None:
    recent = RecentPrompts(is_on=True)
    for number in range(RECENT_MAX + 1):
        recent.add(submit(f"r{number}"), [number])
    assert recent.ids_of("r0", "") is None
    assert recent.ids_of("r1", "") == [1] and recent.ids_of(f"r{RECENT_MAX}", "") == [RECENT_MAX]


def test_a_report_of_what_is_unknown_or_anothers_is_a_404() -> None:
    desk, recent = Desk(), RecentPrompts(is_on=True)
    desk.arrive(QUESTION, MINE)
    recent.add(submit("r1"), [1, 2])
    assert session_report(Status("q", "prompt", "r1", "mine"), desk.sessions, recent) == {
        "ids": [1, 2]
    }
    for what, about in (("prompt", "r1"), ("session", "s1"), ("tree", "s1"), ("session", "no")):
        with pytest.raises(RequestError, match=f"{about!r} is remembered by this worker") as caught:
            session_report(Status("q", what, about, "theirs"), desk.sessions, recent)
        assert (caught.value.status, caught.value.code) == (404, "not_found")

"""Checks that a client which rewrites the end of its conversation goes on with one line.

OpenClaw sends the last messages of each prompt otherwise in the next one. Each such end was kept
as if somebody would go on from it, and what the next prompt did go on from made way for it.
"""

import pytest

from hearth.worker.cache.rewritten_end import REWRITTEN_MAX
from scripts.harness.socketless_worker import Answer, Machine, machine
from tests.helpers.worker.kv_prompts import message, prompt, words

NAME = "qwen3_5"
SYSTEM, USER, END = 120, 300, 150  # tokens of text


def asked(warm: Machine, *ends: int, users: int = USER) -> list[Answer]:
    """Ask a conversation whose last message is other words each time."""
    return [warm.ask(ending(end, users), 2) for end in ends]


def ending(end: int, users: int = USER) -> list[int]:
    head = prompt(NAME, SYSTEM, users)[: -len(message(NAME, "assistant", []))]
    return head + message(NAME, "user", words(end, END)) + message(NAME, "assistant", [])


def lines(warm: Machine) -> int:
    return len(list(warm.keeper.lines))


def left_out(warm: Machine) -> set[int]:
    return {joint.position for joint in warm.keeper.store.joints if joint.is_left_out}


def test_a_prompt_with_another_end_goes_on_with_its_line() -> None:
    warm = machine(NAME)
    asked(warm, 1, 2, 3)
    assert lines(warm) == 1
    (line,) = warm.keeper.lines
    assert line.sponsor is None and line.turns == 3
    tip = warm.keeper.store.joint(line.tip)
    assert tip is not None and not tip.is_left_out


def test_only_the_newest_end_is_where_the_line_goes_on() -> None:
    warm = machine(NAME)
    asked(warm, 1, 2)
    ends = [j for j in warm.keeper.store.joints if not j.leaving]
    assert len(ends) == 2 and sum(joint.is_left_out for joint in ends) == 1
    asked(warm, 1)  # its client goes back to the first
    assert warm.keeper.counts["match_exact"] == 1
    (line,) = warm.keeper.lines
    tip = warm.keeper.store.joint(line.tip)
    assert tip is not None and not tip.is_left_out
    assert len(left_out(warm)) > 0, "the second is left out now"


@pytest.mark.parametrize("case", ["short", "other session", "title", "running"])
def test_what_shares_little_or_is_anothers_opens_a_line(case: str) -> None:
    warm = machine(NAME)
    if case == "short":  # but system and tools
        asked(warm, 1, 2, users=10)
    elif case == "running":
        asked(warm, 1)
        warm.submit(ending(1), 8)
        warm.submit(ending(2), 8)
        warm.run()
    else:
        asked(warm, 1)
        (line,) = warm.keeper.lines
        if case == "other session":
            line.family = "another"
            asked(warm, 2)
        else:
            query = warm.submit(ending(2), 2)  # planned, not yet open
            object.__setattr__(query.request.query, "is_side", True)
            warm.run()
    assert lines(warm) == 2 and not left_out(warm)


def test_an_end_longer_than_clients_rewrite_is_another_conversations() -> None:
    warm = machine(NAME)
    head = prompt(NAME, SYSTEM, 2 * REWRITTEN_MAX)[: -len(message(NAME, "assistant", []))]
    header = message(NAME, "assistant", [])
    for end in (1, 2):
        warm.ask(head + message(NAME, "user", words(end, REWRITTEN_MAX + 64)) + header, 2)
    assert lines(warm) == 2 and not left_out(warm)


def test_a_prompt_that_was_broken_off_is_gone_on_with() -> None:
    warm = machine(NAME)
    asked(warm, 1)
    answer = warm.submit(ending(2), 4)
    cuts = answer.request.query.cuts
    warm.run(until=lambda: answer.request.position == cuts[-2])
    answer.request.lease.is_cancelled = True
    warm.run()
    (line,) = warm.keeper.lines
    tip = warm.keeper.store.joint(line.tip)
    assert tip is not None and tip.position == cuts[-2]
    asked(warm, 2)
    assert lines(warm) == 1

"""Checks that a client which rewrites the end of its conversation goes on with one line.

OpenClaw sends the last messages of each prompt otherwise in the next one. Each such end was kept
as if somebody would go on from it, and what the next prompt did go on from made way for it.
"""

import pytest

from hearth.worker.cache.continued_line import REWRITTEN_MAX
from scripts.harness.socketless_worker import Answer, Machine, machine
from tests.helpers.worker.kv_prompts import follow, message, prompt, words

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
    warm = machine(NAME, tiny=True)
    asked(warm, 1, 2, 3)
    assert lines(warm) == 1
    (line,) = warm.keeper.lines
    assert line.sponsor is None and line.turns == 3
    tip = warm.keeper.store.joint(line.tip)
    assert tip is not None and not tip.is_left_out


def test_only_the_newest_end_is_where_the_line_goes_on() -> None:
    warm = machine(NAME, tiny=True)
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
    warm = machine(NAME, tiny=True)
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
    warm = machine(NAME, tiny=True)
    head = prompt(NAME, SYSTEM, 2 * REWRITTEN_MAX)[: -len(message(NAME, "assistant", []))]
    header = message(NAME, "assistant", [])
    for end in (1, 2):
        warm.ask(head + message(NAME, "user", words(end, REWRITTEN_MAX + 64)) + header, 2)
    assert lines(warm) == 2 and not left_out(warm)


def test_a_prompt_that_was_broken_off_is_gone_on_with() -> None:
    warm = machine(NAME, tiny=True)
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


# ---------------------------------------------------------------- attacks


def told(name: str, *users: tuple[int, int]) -> list[int]:
    """Return a prompt with messages of so many words, by seed."""
    ids = message(name, "system", words(0, SYSTEM))
    for seed, count in users:
        ids += message(name, "user", words(seed, count))
    return ids + message(name, "assistant", [])


def of_family(warm: Machine, ids: list[int], family: str, tokens_max: int = 2) -> Answer:
    answer = warm.submit(ids, tokens_max)
    object.__setattr__(answer.request.query, "family", family)
    warm.run()
    return warm.settled(answer)


def test_a_sub_agent_that_lost_its_states_is_not_its_parents_rewritten_end() -> None:
    """It resumes at the end of system and tools, and shares 3,000 tokens with its own rows only."""
    warm = machine(NAME, tiny=True)
    parent = of_family(warm, told(NAME, (60, 1_500), (61, 1_500)), "s")
    agent = told(NAME, (50, 3_500))
    of_family(warm, agent, "s")
    end = warm.keeper.store.joint(parent.request.query.names[-1])
    for slot in list(warm.keeper.slots):
        warm.keeper.give_up(slot)
    for joint in list(warm.keeper.store.joints):
        if joint.snapshot is not None and joint.arrival.line.number == 2:
            warm.keeper.store.set_snapshot(joint, None)
    again = of_family(warm, follow(NAME, agent, [], 100), "s")
    assert again.request.plan is not None and again.request.plan.matched > 3_000
    assert not end.is_left_out


def test_a_conversation_whose_end_was_evicted_goes_on_with_its_line() -> None:
    """Else its own old line sponsored it: who lost its end once was evicted first again."""
    warm = machine(NAME, tiny=True)
    ids = told(NAME, (1, 400), (2, 100))
    answer = of_family(warm, ids, "s")
    for slot in list(warm.keeper.slots):
        warm.keeper.give_up(slot)
    for _ in range(2):
        (leaf,) = [each for each in warm.keeper.store.extents if not each.end.leaving]
        warm.keeper.store.remove(leaf)
    of_family(warm, follow(NAME, ids, answer.tokens, 40), "s")
    (line,) = warm.keeper.lines
    assert line.turns == 2 and line.sponsor is None


def test_another_session_takes_over_no_line() -> None:
    """Dense models resume amid the last extent; a slot's whole content may be another's head."""
    warm = machine("qwen3", tiny=True, chunk=512)
    first = told("qwen3", (5, 200), (1, 100))
    asked_first = of_family(warm, first, "A")
    other = first[: -len(message("qwen3", "user", words(1, 100)))]
    of_family(warm, other + message("qwen3", "user", words(2, 100)), "B")
    again = of_family(warm, follow("qwen3", first, asked_first.tokens, 50), "A")
    families = {line.number: line.family for line in warm.keeper.lines}
    assert families == {1: "A", 2: "B"} and again.cached > 0


def test_a_prompt_that_another_session_broke_off_makes_nobody_its_line() -> None:
    warm = machine(NAME, tiny=True)
    ids = told(NAME, (70, 400))
    broken_off = warm.submit(ids, 2)
    object.__setattr__(broken_off.request.query, "family", "X")
    warm.run(until=lambda: broken_off.request.position >= 192)
    broken_off.request.lease.is_cancelled = True
    warm.run()
    answer = of_family(warm, ids, "B")
    assert answer.cached >= 192 and [line.family for line in warm.keeper.lines] == ["X", "B"]


def test_an_end_that_is_rewritten_amid_an_extent_is_left_out_too() -> None:
    """Dense models go on from amid it."""
    warm = machine("qwen3", tiny=True, chunk=512)
    head, end = message("qwen3", "system", words(0, SYSTEM)), message("qwen3", "assistant", [])
    for last in (2, 3):
        said = message("qwen3", "user", words(1, 200) + words(last, 60))
        answer = of_family(warm, head + said + end, "s")
    assert answer.cached > SYSTEM + 200, "within the extent"
    assert lines(warm) == 1 and left_out(warm)

"""Checks that a client which rewrites the end of its conversation goes on with one line.

OpenClaw sends the last messages of each prompt otherwise in the next one. Each such end was kept
as if somebody would go on from it, and what the next prompt did go on from made way for it.
"""

from pathlib import Path

import pytest

from hearth.shared.wire_messages import Prompt, Speaker
from hearth.worker.cache.conversation_priority import Conversation
from hearth.worker.stream.answer_parts import AnswerParts
from scripts.harness.agent_worker import Desk
from scripts.harness.model_families import family
from scripts.harness.socketless_worker import Answer, Machine, machine
from tests.helpers.worker.disk_workers import Workers
from tests.helpers.worker.kv_prompts import KINDS, follow, message, prompt, words

NAME = "qwen3_5"
SYSTEM, USER, END = 120, 300, 150  # tokens of text
ONE, OTHER = Conversation(1), Conversation(2)


def asked(warm: Machine, *ends: int) -> list[Answer]:
    """Ask a conversation whose last message is other words each time."""
    return [of(warm, ending(end), ONE) for end in ends]


def of(warm: Machine, ids: list[int], conversation: Conversation, tokens_max: int = 2) -> Answer:
    answer = warm.submit(ids, tokens_max, conversation=conversation)
    warm.run()
    return warm.settled(answer)


def ending(end: int) -> list[int]:
    head = prompt(NAME, SYSTEM, USER)[: -len(message(NAME, "assistant", []))]
    return head + message(NAME, "user", words(end, END)) + message(NAME, "assistant", [])


def lines(warm: Machine) -> int:
    return len(list(warm.keeper.lines.all))


def left_out(warm: Machine) -> set[int]:
    return {node.position for node in warm.keeper.store.nodes if node.is_left_out}


def test_a_prompt_with_another_end_goes_on_with_its_line() -> None:
    warm = machine(NAME, tiny=True)
    asked(warm, 1, 2, 3)
    assert lines(warm) == 1
    (line,) = warm.keeper.lines.all
    assert line.sponsor is None and line.turns == 3
    tip = warm.keeper.store.node(line.tip)
    assert tip is not None and not tip.is_left_out


def test_only_the_newest_end_is_where_the_line_goes_on() -> None:
    warm = machine(NAME, tiny=True)
    asked(warm, 1, 2)
    ends = [j for j in warm.keeper.store.nodes if not j.leaving]
    assert len(ends) == 2 and sum(node.is_left_out for node in ends) == 1
    asked(warm, 1)  # its client goes back to the first
    assert warm.keeper.counts["match_exact"] == 1
    (line,) = warm.keeper.lines.all
    tip = warm.keeper.store.node(line.tip)
    assert tip is not None and not tip.is_left_out
    assert len(left_out(warm)) > 0, "the second is left out now"


@pytest.mark.parametrize("case", ["another conversation", "another session", "running"])
def test_what_is_anothers_or_runs_beside_it_opens_a_line(case: str) -> None:
    warm = machine(NAME, tiny=True)
    asked(warm, 1)
    if case == "running":
        for end in (1, 2):
            warm.submit(ending(end), 8, conversation=ONE)
        warm.run()
    else:
        of(warm, ending(2), OTHER if case == "another conversation" else Conversation(2, "other"))
    assert lines(warm) == 2 and not left_out(warm)


def test_two_requests_of_a_conversation_that_overlapped_go_on_each_with_its_own() -> None:
    warm = machine(NAME, tiny=True)
    ids = prompt(NAME, SYSTEM, USER)
    first = of(warm, ids, ONE)
    follows = [follow(NAME, ids, first.tokens, 100, seed) for seed in (1, 2)]
    both = [warm.submit(each, 2, conversation=ONE) for each in follows]
    warm.run()
    assert [line.number for line in warm.keeper.lines.all] == [1, 1]
    for each, answer in zip(follows, both, strict=True):
        of(warm, follow(NAME, each, answer.tokens, 100), ONE)
    assert lines(warm) == 2 and not left_out(warm)


def test_a_prompt_that_was_broken_off_is_gone_on_with() -> None:
    warm = machine(NAME, tiny=True)
    asked(warm, 1)
    answer = warm.submit(ending(2), 4, conversation=ONE)
    cuts = answer.request.query.cuts
    warm.run(until=lambda: answer.request.position == cuts[-2])
    answer.request.lease.is_cancelled = True
    warm.run()
    (line,) = warm.keeper.lines.all
    tip = warm.keeper.store.node(line.tip)
    assert tip is not None and tip.position == cuts[-2]
    asked(warm, 2)
    assert lines(warm) == 1


@pytest.mark.parametrize("follows", [True, False])
def test_what_no_session_knows_goes_on_with_the_line_whose_last_prompt_it_has_whole(
    follows: bool,
) -> None:
    """A raw prompt, and one whose request was broken off: each has a number of its own."""
    warm = machine(NAME, tiny=True)
    ids = ending(1)
    first = warm.ask(ids, 2)
    for slot in list(warm.keeper.slots):
        warm.keeper.release_slot(slot)
    warm.ask(follow(NAME, ids, first.tokens, 100) if follows else ending(2), 2)
    assert [line.turns for line in warm.keeper.lines.all] == ([2] if follows else [1, 1])


@pytest.mark.parametrize("name", KINDS)
def test_who_goes_on_behind_all_that_its_slot_holds_leaves_out_nothing(name: str) -> None:
    warm, ids = machine(name, tiny=True), prompt(name, SYSTEM, USER)
    for _ in range(3):
        answer = of(warm, ids, ONE, 8)
        ids = follow(name, ids, answer.tokens, 40)
    assert answer.usage is not None and answer.usage.source == "slot"
    assert not left_out(warm)


def test_kept_kv_is_reported_under_the_number_of_its_conversations_first_line(
    tmp_path: Path,
) -> None:
    desk = Desk("qwen3", family("qwen3"), tmp_path)

    def ask(*contents: str, session: str = "s", has_tools: bool = True) -> None:
        asks = [{"role": "user", "content": content} for content in contents]
        system = {"role": "system", "content": "Be brief. " * 90}
        tools = [{"type": "function", "function": {"name": "read"}}] if has_tools else []
        prompt = Prompt([system, *asks], tools, speaker=Speaker("", session))
        desk.ask(desk.named(prompt), AnswerParts("", "Yes."))

    ask("one end", session="other")
    for end in ("one end", "another end", "a third"):
        ask("a" * 900, "b" * 900, end)
    ask("this shares system and tools alone")
    ask("and so does this")
    ask("a title of it", has_tools=False)
    told = [(line.number, line.conversation) for line in desk.sessions.lines.lines]
    assert [conversation for _, conversation in told] == [1, 2, 2, 2, 7, 8, 9]
    assert len(dict(told)) == 7, "each branch is a line"
    kept = [(line.number, line.family, line.is_side) for line in desk.machine.keeper.lines.all]
    assert kept == [
        (1, "/other", False),
        (2, "/s", False),
        (7, "/s", False),
        (8, "/s", False),
        (9, "/s", True),
    ]


def test_what_comes_back_from_disk_is_its_conversations(workers: Workers) -> None:
    asked = Conversation(5, "s")
    of(workers.start(NAME), ending(1), asked)
    workers.flush()
    warm = workers.start(NAME)
    answer = of(warm, ending(1), asked)
    assert answer.usage is not None and answer.usage.source == "ssd"
    assert [(line.number, line.family, line.turns) for line in warm.keeper.lines.all] == [
        (5, "s", 2)
    ]


# ---------------------------------------------------------------- attacks


def told(name: str, *users: tuple[int, int]) -> list[int]:
    """Return a prompt with messages of so many words, by seed."""
    ids = message(name, "system", words(0, SYSTEM))
    for seed, count in users:
        ids += message(name, "user", words(seed, count))
    return ids + message(name, "assistant", [])


def test_a_sub_agent_that_lost_its_states_is_not_its_parents_rewritten_end() -> None:
    """It resumes at the end of system and tools, and shares 3,000 tokens with its own rows only."""
    warm = machine(NAME, tiny=True)
    parent = of(warm, told(NAME, (60, 1_500), (61, 1_500)), Conversation(1, "s"))
    agent = told(NAME, (50, 3_500))
    of(warm, agent, Conversation(2, "s"))
    end = warm.keeper.store.node(parent.request.query.names[-1])
    for slot in list(warm.keeper.slots):
        warm.keeper.release_slot(slot)
    for node in list(warm.keeper.store.nodes):
        if node.snapshot is not None and node.arrival.line.number == 2:
            warm.keeper.store.set_snapshot(node, None)
    again = of(warm, follow(NAME, agent, [], 100), Conversation(2, "s"))
    state = again.request.prefill
    assert state is not None and state.plan.matched > 3_000
    assert not end.is_left_out


def test_a_conversation_whose_end_was_evicted_goes_on_with_its_line() -> None:
    """Else its own old line sponsored it: who lost its end once was evicted first again."""
    warm = machine(NAME, tiny=True)
    ids = told(NAME, (1, 400), (2, 100))
    answer = of(warm, ids, ONE)
    for slot in list(warm.keeper.slots):
        warm.keeper.release_slot(slot)
    for _ in range(2):
        (leaf,) = [each for each in warm.keeper.store.extents if not each.end.leaving]
        warm.keeper.store.remove(leaf)
    of(warm, follow(NAME, ids, answer.tokens, 40), ONE)
    (line,) = warm.keeper.lines.all
    assert line.turns == 2 and line.sponsor is None


def test_another_session_takes_over_no_line() -> None:
    """Dense models resume amid the last extent; a slot's whole content may be another's head."""
    warm = machine("qwen3", tiny=True, chunk=512)
    first = told("qwen3", (5, 200), (1, 100))
    asked_first = of(warm, first, Conversation(1, "A"))
    other = first[: -len(message("qwen3", "user", words(1, 100)))]
    of(warm, other + message("qwen3", "user", words(2, 100)), Conversation(2, "B"))
    again = of(warm, follow("qwen3", first, asked_first.tokens, 50), Conversation(1, "A"))
    families = {line.number: line.family for line in warm.keeper.lines.all}
    assert families == {1: "A", 2: "B"} and again.cached > 0


def test_a_prompt_that_another_session_broke_off_makes_nobody_its_line() -> None:
    warm = machine(NAME, tiny=True)
    ids = told(NAME, (70, 400))
    broken_off = warm.submit(ids, 2, conversation=Conversation(1, "X"))
    warm.run(until=lambda: broken_off.request.position >= 192)
    broken_off.request.lease.is_cancelled = True
    warm.run()
    answer = of(warm, ids, Conversation(2, "B"))
    assert answer.cached >= 192 and [line.family for line in warm.keeper.lines.all] == ["X", "B"]


def test_an_end_that_is_rewritten_amid_an_extent_is_left_out_too() -> None:
    """Dense models go on from amid it."""
    warm = machine("qwen3", tiny=True, chunk=512)
    head, end = message("qwen3", "system", words(0, SYSTEM)), message("qwen3", "assistant", [])
    for last in (2, 3):
        said = message("qwen3", "user", words(1, 200) + words(last, 60))
        answer = of(warm, head + said + end, ONE)
    assert answer.cached > SYSTEM + 200, "within the extent"
    assert lines(warm) == 1 and left_out(warm)

"""Checks whose turn for a slot a request uses, and what its answer is held to."""

from dataclasses import replace

import pytest

from hearth.shared.wire_messages import Constraints, Prompt, Sampling, Speaker, Submit, ThinkingWish
from hearth.worker.threads.request_builder import constraints_of, family_of, queue_name_of
from tests.helpers.worker.session_prompts import WORDS, Desk

NAMED = Speaker("k", "s1")
PI = Speaker("k", client="pi", conversation="pi-1")
CURL = Speaker("k", client="curl", conversation="curl-1")
ASKS = [{"role": "user", "content": "Fix it"}]
ANSWER = {"role": "assistant", "content": "Done."}


def asker(speaker: Speaker, *, goes_on: bool = True) -> str:
    return queue_name_of(Prompt(ASKS, speaker=speaker), goes_on=goes_on)


def test_a_session_is_one_asker_with_its_sub_agents() -> None:
    assert asker(NAMED) == asker(NAMED, goes_on=False) == asker(Speaker("k", "s2", parent="s1"))
    assert asker(NAMED) == asker(replace(NAMED, agent="a")) != asker(Speaker("other", "s1"))


def test_conversations_without_ids_are_askers_by_client_and_line_once_they_go_on() -> None:
    other = replace(PI, conversation="pi-2")
    assert len({asker(PI), asker(other), asker(CURL), asker(NAMED)}) == 4
    assert asker(PI) != asker(replace(PI, key="other"))


def test_first_questions_of_one_client_share_a_turn() -> None:
    other = replace(PI, conversation="pi-2")
    assert asker(PI, goes_on=False) == asker(other, goes_on=False)
    assert asker(PI, goes_on=False) != asker(CURL, goes_on=False)
    assert asker(PI, goes_on=False) not in (asker(PI), asker(other))


def test_a_conversation_goes_on_once_it_was_answered_here() -> None:
    desk = Desk()
    assert not desk.arrive(ASKS, PI).is_continuation
    desk.ask(ASKS, WORDS, speaker=PI)
    assert desk.arrive([*ASKS, ANSWER, *ASKS], PI).is_continuation
    edited = {"role": "user", "content": "No, this"}
    assert desk.arrive([*ASKS, edited, ANSWER, *ASKS], PI).is_continuation
    assert not desk.arrive(ASKS, PI).is_continuation, "the same question again is a first one"


def test_questions_with_examples_of_answers_or_the_beginning_of_one_go_on_with_nothing() -> None:
    desk = Desk()
    for number in range(3):
        asks = {"role": "user", "content": f"Question {number}"}
        for prompt in ([asks, ANSWER], [asks, ANSWER, *ASKS]):
            visit = desk.arrive(prompt, replace(CURL, conversation=f"curl-{number}"))
            assert not visit.is_continuation
        desk.end(visit, WORDS)


def test_kv_has_a_family_only_where_a_session_has_a_name() -> None:
    assert family_of(Prompt(ASKS, speaker=PI)) == ""
    assert family_of(Prompt(ASKS, speaker=NAMED)) == asker(NAMED)


# ---------------------------------------------------------------- what it is held to


@pytest.mark.parametrize(
    ("constraints", "on", "budget"),
    [
        (Constraints(is_json=True), False, 0),
        (Constraints(tool_choice="required"), False, 0),
        (Constraints(is_json=True), True, None),
        (Constraints(is_json=True, thinking_budget=9), None, 9),
        (Constraints(), False, None),
        (Constraints(tool_choice="none"), False, None),
    ],
)
def test_a_form_leaves_no_room_to_think_where_the_client_switched_it_off(
    constraints: Constraints, on: bool | None, budget: int | None
) -> None:
    prompt = Prompt([], thinking=ThinkingWish(on))
    found = constraints_of(Submit("r1", prompt, Sampling(), constraints))
    assert found == replace(constraints, thinking_budget=budget)

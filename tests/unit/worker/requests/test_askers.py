"""Checks whose turn for a slot a request uses."""

from dataclasses import dataclass, replace
from typing import Any

from hearth.shared.wire_messages import Prompt, Speaker
from hearth.worker.requests.request_builder import asker_of, family_of
from hearth.worker.schedule.fair_queue import in_turn

NAMED = Speaker("k", "s1")
PI = Speaker("k", client="pi", conversation="pi-1")
CURL = Speaker("k", client="curl", conversation="curl-1")
ASKS = [{"role": "user", "content": "Fix it"}]
GOES_ON: list[dict[str, Any]] = [*ASKS, {"role": "assistant", "content": "Done."}, *ASKS]


@dataclass(eq=False)
class Waiting:
    asker: str
    turn: int = 0


def asker(speaker: Speaker, messages: list[dict[str, Any]] = GOES_ON) -> str:
    return asker_of(Prompt(messages, speaker=speaker))


def test_a_session_is_one_asker_with_its_sub_agents() -> None:
    assert asker(NAMED) == asker(NAMED, ASKS) == asker(Speaker("k", "s2", parent="s1"))
    assert asker(NAMED) == asker(replace(NAMED, agent="a")) != asker(Speaker("other", "s1"))


def test_conversations_without_ids_are_askers_by_client_and_line_once_they_go_on() -> None:
    other = replace(PI, conversation="pi-2")
    assert len({asker(PI), asker(other), asker(CURL), asker(NAMED)}) == 4
    assert asker(PI) != asker(replace(PI, key="other"))


def test_first_questions_of_one_client_share_a_turn() -> None:
    other = replace(PI, conversation="pi-2")
    assert asker(PI, ASKS) == asker(other, ASKS) != asker(CURL, ASKS)
    assert asker(PI, ASKS) not in (asker(PI), asker(other))


def test_a_program_that_asks_a_hundred_things_at_once_holds_nobody_up() -> None:
    flood = [replace(CURL, conversation=f"curl-{number}") for number in range(100)]
    waiting = [*(Waiting(asker(each, ASKS)) for each in flood), Waiting(asker(PI)), Waiting("")]
    order = [each.asker for each in in_turn(waiting, 0)]
    assert order.index(asker(PI)) <= 1 and order.index("") <= 2


def test_kv_has_a_family_only_where_a_session_has_a_name() -> None:
    assert family_of(Prompt(GOES_ON, speaker=PI)) == ""
    assert family_of(Prompt(ASKS, speaker=NAMED)) == asker(NAMED)

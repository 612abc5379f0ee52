"""A request is told what it lost and nothing else, whatever its client does to a conversation.

This file plays some conversations, HEARTH_EXAMPLES=N as many others, and the smallest ones that
tell the rules apart.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from scripts.harness.chat_client import Asked, Variant
from scripts.harness.loss_oracle import Judge, ReadAgain, Reading, read_again
from scripts.harness.random_conversations import (
    NUMBER_MAX,
    STEPS,
    VARIANTS,
    Plan,
    Player,
    Step,
)

ROUNDS = 5
LATER = 1  # `other` of a step behind which the conversation goes on


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(params=VARIANTS[:4], ids=lambda each: each.family)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen


def findings(player: Player, asked: list[Asked], also_short: bool = False) -> list[str]:
    found = Judge(player.plan, player.family.tokenizer).findings(asked)
    false = [row for row in found if also_short or not row[1].is_short]
    return [f"{each.kind}: {finding}" for each, finding in false]


# ---------------------------------------------------------------- any conversation

NUMBERS = st.integers(0, NUMBER_MAX)
PLANS = st.builds(
    Plan,
    variant=st.sampled_from(VARIANTS),
    steps=st.lists(
        st.builds(
            Step,
            st.sampled_from([*("append",) * 4, *STEPS]),
            st.sampled_from([0, 0, 1, 2, 3]),
            NUMBERS,
            NUMBERS,
        ),
        min_size=1,
        max_size=7,
    ).map(tuple),
    is_named=st.sampled_from([True, True, False]),
    rounds=st.sampled_from([1, 1, 3, 6, 10, 24]),
    tools=st.sampled_from([0, 2, 3]),
)


@settings(max_examples=int(os.environ.get("HEARTH_EXAMPLES", "40")))
@given(plan=PLANS)
def test_losses_are_told_as_they_are_and_no_others(plan: Plan, logs: Path) -> None:
    player = Player(plan, logs)
    counts = player.desk.sessions.counts
    counted = counts["lost_tokens"]
    asked = player.play()
    assert findings(player, asked) == []
    told = [each.told["lost"] for each in asked if each.told]
    assert counts["lost_tokens"] - counted == sum(told)


APPENDS = (Step("append"),) * 4


def test_answers_of_these_conversations_are_drafted_for(variant: Variant, logs: Path) -> None:
    """Else nothing here would hold that drafts lose nothing."""
    player = Player(Plan(variant, APPENDS), logs)
    drafts = player.desk.machine.drafts

    def drafted() -> int:
        return sum(row["drafted"] for row in drafts.report()["by_source"].values())

    before = drafted()
    player.play()
    assert drafted() > before


# ---------------------------------------------------------------- nothing is lost


def played(plan: Plan, logs: Path) -> list[Asked]:
    return Player(plan, logs).play()


def test_a_conversation_that_is_cut_back_further_and_further_loses_nothing(
    variant: Variant, logs: Path
) -> None:
    """An imported history, and one that was answered here: their client asks an old question."""
    cuts = tuple(Step("cut", place=at) for at in reversed(range(ROUNDS)))
    for plan in (
        Plan(variant, cuts, rounds=ROUNDS),
        Plan(variant, (*(Step("append", other=9),) * (ROUNDS - 1), *cuts), tools=0),
    ):
        asked = [each for each in played(plan, logs) if each.kind == "cut"]
        assert len(asked) == ROUNDS and len(asked[-1].messages) == 2
        assert [each.told for each in asked] == [None] * ROUNDS


@pytest.mark.parametrize("is_named", [True, False])
def test_a_client_that_leaves_answers_out_loses_nothing(
    variant: Variant, is_named: bool, logs: Path
) -> None:
    for rounds in (1, ROUNDS):
        steps = (Step("unanswered", other=12),) * 2
        asked = played(Plan(variant, steps, is_named, rounds, tools=0), logs)
        assert [each.told for each in asked] == [None] * 3


@pytest.mark.parametrize("kind", ["cut_and_ask", "fork", "clear", "compact", "retry", "agent"])
def test_what_has_nothing_in_common_behind_its_beginning_loses_nothing(
    kind: str, logs: Path
) -> None:
    asked = played(Plan(VARIANTS[0], (*APPENDS, Step(kind)), rounds=3), logs)[-1]
    assert asked.kind == kind and asked.told is None, asked.told


def test_forks_that_are_asked_at_once_lose_nothing(variant: Variant, logs: Path) -> None:
    asked = played(Plan(variant, (Step("parallel", other=9),) * 2), logs)
    assert [each.told for each in asked if each.before is None] == [None] * 5


# ---------------------------------------------------------------- a loss is told

EDITS = {
    "a system prompt": (Step("edit", place=0, other=LATER), "system prompt", 0),
    "a question": (Step("edit", place=1, other=LATER), "message edited", 1),
    "an answer": (Step("edit", place=2, other=LATER), "assistant turn", 2),
    "dates": (Step("date", other=LATER), "volatile field", 0),
    "an inserted question": (Step("insert", place=1, other=LATER), "message inserted", 3),
    "a removed question": (Step("remove", place=0, other=LATER), "message removed", 1),
    "a tool that came first": (Step("tools", place=0, other=LATER), "tool added", -1),
    "a tool that went": (Step("tools", place=2, other=4 + LATER), "tool removed", -1),
    "tools in another order": (Step("tools", place=3, other=LATER), "tool order", -1),
    "a tool's description": (Step("tools", place=4, other=4 + LATER), "tool schema", -1),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("steps", [(), APPENDS[:2]], ids=["imported", "answered here"])
def test_an_edit_of_the_history_is_told_with_what_it_cost(
    name: str, steps: tuple[Step, ...], logs: Path
) -> None:
    step, cause, message = EDITS[name]
    asked = played(Plan(VARIANTS[0], (*steps, step), rounds=ROUNDS, tools=2), logs)[-1]
    told = asked.told
    assert told is not None
    assert (told["cause"], told["message"]) == (cause, message), told
    assert 100 < told["lost"] <= asked.answer.prefilled, (told, asked.answer.prefilled)


# ---------------------------------------------------------------- smallest ones of what was found

HYBRID, EXACT = VARIANTS[5], VARIANTS[7]
SMALLEST = {
    "an answer to the same question that another line got": Plan(
        VARIANTS[0],
        (Step("insert"), Step("cut", place=1), Step("remove", other=1)),
        tools=2,
    ),
    "no state where a stop string cut an answer": Plan(
        HYBRID, (Step("stopped"), Step("stopped")), tools=0
    ),
    "exact mode has no cut where an answer was left out": Plan(
        EXACT, (Step("unanswered", other=7), Step("unanswered")), tools=0
    ),
    "an edit of what begins as a line that was cut back": Plan(
        VARIANTS[0],
        (Step("parallel"), Step("cut"), Step("edit", chat=1, place=28)),
        rounds=6,
        tools=0,
    ),
    "an edit against an older request of the line": Plan(
        VARIANTS[0], (Step("insert"), Step("tools", other=1), Step("truncate", other=1)), tools=0
    ),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_conversations_that_were_told_falsely_are_told_rightly(
    name: str, logs: Path
) -> None:
    player = Player(SMALLEST[name], logs)
    assert findings(player, player.play()) == []


# ---------------------------------------------------------------- the oracle sees what is wrong


def test_the_oracle_counts_words_that_were_known() -> None:
    pieces = ["<", "z0001", " z00", "02", "><", "z0003", " z0004", ">"]
    now = Reading(pieces, range(8))
    assert [name for name, _, _ in now.words] == ["z0001", "z0002", "z0003", "z0004"]
    everything = {"z0001", "z0002", "z0003", "z0004"}
    assert read_again(now, 0, everything) == ReadAgain(words=5, runs=1, most=8)
    assert read_again(now, 0, everything - {"z0003"}) == ReadAgain(words=4, runs=2, most=7)
    assert read_again(now, 3, everything - {"z0003"}) == ReadAgain(words=2, runs=2, most=4)
    assert read_again(now, 5, {"z0001"}) == ReadAgain(words=0, runs=0, most=0)


TOLD: dict[str, Any] = {"cause": "system prompt", "message": 0, "token": 0, "remedy": ""}
EDIT = Step("edit", place=0, other=LATER)
FALSEHOODS: dict[str, tuple[Step, dict[str, Any] | None]] = {
    "not told": (EDIT, None),
    "told too little": (EDIT, {"lost": 17}),
    "wrong request": (Step("edit", place=3, other=LATER), {"lost": 300}),
    "nothing read again": (Step("unanswered"), {"lost": 17}),
    "more than prefilled": (Step("unanswered"), {"lost": 90}),
    "more than read again": (Step("edit", place=3, other=LATER), {"lost": 9_999}),
    "remedy": (Step("unanswered"), {"remedy": "Set PRESERVE_THINKING=true.", "lost": 17}),
    "wrong token": (EDIT, {"lost": 300, "token": 1}),
    "wrong cause": (Step("tools", other=LATER), {"lost": 300, "token": None}),
}


@pytest.mark.parametrize("rule", FALSEHOODS)
def test_the_oracle_sees_what_is_told_falsely(rule: str, logs: Path) -> None:
    step, told = FALSEHOODS[rule]
    player = Player(Plan(VARIANTS[0], (step,), rounds=ROUNDS, tools=0), logs)
    asked = player.play()
    answer = asked[-1].answer
    assert answer.usage is not None and findings(player, asked, also_short=True) == []
    true = answer.usage.divergence or {}
    if told is not None:
        told = TOLD | told
        told["token"] = true["token"] if told["token"] is None else told["token"]
    answer.usage = dataclasses.replace(answer.usage, divergence=told)
    found = findings(player, asked, also_short=True)
    assert any(f": {rule}: " in finding for finding in found), found


def test_every_kind_of_step_is_answered_by_every_worker(variant: Variant, logs: Path) -> None:
    steps = [step for kind in STEPS for step in (Step("append"), Step(kind, 0, 1, 1))]
    player = Player(Plan(variant, tuple(steps), rounds=3), logs)
    asked = player.play()
    assert {"import", *STEPS} - {each.kind for each in asked} == set()
    assert player.refused == 0

"""A request is told what it lost and nothing else, whatever its client does to a conversation.

This file plays some conversations, and the smallest ones that tell the rules apart.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from scripts.harness.chat_client import Asked
from scripts.harness.loss_oracle import Judge
from scripts.harness.random_conversations import NUMBER_MAX, STEPS, VARIANTS, Plan, Player, Step

ROUNDS = 5
LATER = 1  # `other` of a step behind which the conversation goes on


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


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


@given(plan=PLANS)
def test_losses_are_told_as_they_are_and_no_others(plan: Plan, logs: Path) -> None:
    player = Player(plan, logs)
    counts = player.desk.sessions.counts
    counted = counts["lost_tokens"]
    asked = player.play()
    assert findings(player, asked) == []
    told = [each.told["lost"] for each in asked if each.told]
    assert counts["lost_tokens"] - counted == sum(told)


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

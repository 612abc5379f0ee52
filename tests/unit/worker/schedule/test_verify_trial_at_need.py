"""A worker tries whether its model verifies drafts when it first drafts, and never again."""

from typing import Any

import pytest

from hearth.shared.wire_messages import Sampling
from hearth.worker.engine import engine as engine_module
from hearth.worker.schedule.answers.answer_drafts import AnswerDrafts, DraftPolicy, Reach
from scripts.harness.socketless_worker import Machine, marks, vocabulary
from tests.helpers.models.counted_model import counted

NAME = "qwen3"
PROMPT = [(i * 7919 + 13) % 2900 + 50 for i in range(40)]
TRIAL = 24
TOKENS = 12


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return what each trial says, as they come."""
    said: list[bool] = []
    whole = engine_module.verifies_like_alone

    def noted(*given: Any) -> bool:
        said.append(whole(*given))
        return said[-1]

    monkeypatch.setattr(engine_module, "verifies_like_alone", noted)
    return said


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Have the model be found not to verify; return a list of the trials."""
    said: list[bool] = []

    def refused(*_given: Any) -> bool:
        said.append(False)
        return False

    monkeypatch.setattr(engine_module, "verifies_like_alone", refused)
    return said


def drafting(model: Any, reach: Reach, reach_max: Reach = "all") -> Machine:
    drafts = AnswerDrafts(DraftPolicy("lookup", reach, reach_max))
    return Machine(model, marks(NAME), vocabulary(NAME), drafts=drafts, running_max=1)


def test_the_first_answer_that_is_drafted_for_has_the_model_tried_and_no_other(
    trials: list[bool],
) -> None:
    model = counted(NAME)
    worker = drafting(model, "none")
    worker.ask(PROMPT, TOKENS)
    assert trials == []
    fed = model.model.tokens
    asks = Sampling(speculate=True)
    first = worker.ask([60, *PROMPT], 1, sampling=asks)
    assert trials == [True]
    assert model.model.tokens - fed == len(PROMPT) + 1 + TRIAL
    fed = model.model.tokens
    again = worker.ask([61, *PROMPT], 1, sampling=asks)
    assert trials == [True]
    assert model.model.tokens - fed == len(PROMPT) + 1
    assert len(first.tokens) == len(again.tokens) == 1


def test_a_model_that_cannot_verify_is_tried_once_and_says_what_it_says_without_drafts(
    refusals: list[bool],
) -> None:
    plain = drafting(counted(NAME), "none")
    expected = [plain.ask([seed, *PROMPT], TOKENS).tokens for seed in (60, 61)]
    assert refusals == []
    worker = drafting(counted(NAME), "all")
    assert worker.drafts.report()["state"] == "on"
    answers = [worker.ask([seed, *PROMPT], TOKENS, prediction=expected[0]) for seed in (60, 61)]
    assert [answer.tokens for answer in answers] == expected
    assert refusals == [False]
    assert worker.drafts.report()["state"] == "off"
    assert "cannot verify" in worker.drafts.report()["reason"]
    assert worker.drafts.report()["bytes"] == 0
    asked = worker.ask([60, *PROMPT], TOKENS, sampling=Sampling(speculate=True))
    assert asked.tokens == expected[0] and asked.request.drafter is None
    assert refusals == [False]

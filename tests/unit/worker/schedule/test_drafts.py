"""Drafts in a worker: what is counted of them, when the model is tried, and a draft model's."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.shared.wire_messages import Sampling
from hearth.worker.engine import engine as engine_module
from hearth.worker.engine.decode.draft_model import DraftModel
from hearth.worker.schedule.answer_drafts import AnswerDrafts, DraftPolicy, Reach
from scripts.harness.socketless_worker import Answer, Machine, machine, marks, vocabulary
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.models.counted_model import counted
from tests.helpers.models.draft_heads import KnowingHead

NAME, HEADED = "qwen3", "qwen3_5_vl"
TOKENS = 24
TRIAL = 24  # tokens
PROMPT = [(i * 7919 + 13) % 2900 + 50 for i in range(40)]
LOOKUP = DraftPolicy("lookup", "all", "all", curve={1: 1.0, 8: 1.01})  # so that drafts are long

# ---------------------------------------------------------------- what is counted


@cache
def plain() -> list[int]:
    drafts = AnswerDrafts(DraftPolicy())
    return machine(NAME, tiny=True, drafts=drafts).ask(PROMPT, TOKENS).tokens


def counts(worker_drafts: AnswerDrafts) -> dict[str, int]:
    report = worker_drafts.report()
    told = {
        name: sum(row[name] for row in report["by_source"].values())
        for name in ("drafted", "accepted")
    }
    return told | {"tokens": report["tokens"], "forwards": report["forwards"]}


@given(st.integers(0, TOKENS - 1), st.integers(1, TOKENS), st.booleans())
def test_accepted_are_those_that_an_answer_got_wherever_a_stop_or_its_limit_ends_it(
    end: int, limit: int, lies: bool
) -> None:
    drafts = AnswerDrafts(LOOKUP)
    worker = machine(NAME, tiny=True, drafts=drafts, end_ids=frozenset({plain()[end]}))
    prediction = [77 if lies and place % 7 == 6 else t for place, t in enumerate(plain())]
    said = worker.ask(PROMPT, limit, prediction=prediction)
    usage, told = said.usage, counts(drafts)
    assert usage is not None and said.tokens == plain()[: usage.completion_tokens]
    assert told["tokens"] == usage.completion_tokens
    assert told["accepted"] == usage.accepted_prediction_tokens
    assert told["drafted"] - told["accepted"] == usage.rejected_prediction_tokens
    assert told["forwards"] == usage.decode_forwards
    assert told["accepted"] + told["forwards"] == told["tokens"], "none lies behind the end"
    speedup = drafts.report()["speedup_estimate"]
    assert speedup is None or speedup <= usage.completion_tokens / usage.decode_forwards + 1e-3


# ---------------------------------------------------------------- when the model is tried


def trials_of(monkeypatch: pytest.MonkeyPatch, verdict: bool | None = None) -> list[bool]:
    """Return what each trial says, as they come: its own verdict, or this one."""
    said: list[bool] = []
    whole = engine_module.verifies_like_alone

    def noted(*given: Any) -> bool:
        said.append(whole(*given) if verdict is None else verdict)
        return said[-1]

    monkeypatch.setattr(engine_module, "verifies_like_alone", noted)
    return said


def tried(model: Any, reach: Reach) -> Machine:
    drafts = AnswerDrafts(DraftPolicy("lookup", reach, "all"))
    return Machine(model, marks(NAME), vocabulary(NAME), drafts=drafts, running_max=1)


def test_the_first_answer_that_is_drafted_for_has_the_model_tried_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials, model = trials_of(monkeypatch), counted(NAME)
    worker = tried(model, "none")
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals = trials_of(monkeypatch, verdict=False)
    plain = tried(counted(NAME), "none")
    expected = [plain.ask([seed, *PROMPT], TOKENS).tokens for seed in (60, 61)]
    assert refusals == []
    worker = tried(counted(NAME), "all")
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


# ---------------------------------------------------------------- a draft model


def headed(model: DraftModel, reach: Reach = "all") -> Machine:
    return machine(HEADED, drafts=AnswerDrafts(replace(LOOKUP, reach=reach), model))


def cold_answer(ids: list[int]) -> Answer:
    cold = machine(HEADED, keeps=False)
    cold.drafts.policy = DraftPolicy()
    return cold.ask(ids, TOKENS)


def text(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50, 2900) for _ in range(count)]


def test_a_draft_model_drafts_behind_a_cold_prompt_and_behind_a_kept_one() -> None:
    head, ids = KnowingHead([]), list[int]()
    warm = headed(DraftModel(head, None))
    for turn in range(3):
        ids = [*ids, *text(turn, 90)]
        theirs = cold_answer(ids)
        expected = theirs.tokens
        head.know([*ids, *expected])
        answer = warm.ask(ids, TOKENS)
        same_tokens(answer, theirs)
        assert answer.cached <= head.begun[-1] < len(ids) - 2, "it has read of the prompt too"
        assert (answer.cached > 0) == (turn > 0)
        assert answer.usage is not None and answer.usage.decode_forwards <= TOKENS // 2
        ids += expected
    assert warm.drafts.report()["by_source"]["model"]["accepted"] > TOKENS
    warm.check()


def test_where_nothing_is_drafted_from_text_a_draft_model_is_not_asked_either() -> None:
    head = KnowingHead([])
    for reach in ("none", "forced"):
        still = headed(DraftModel(head, None), reach)
        ids = text(1, 40)
        same_tokens(still.ask(ids, TOKENS), cold_answer(ids))
        assert still.drafts.report()["by_source"]["model"]["drafted"] == 0
    assert not head.begun

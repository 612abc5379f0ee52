"""A draft model drafts for requests, whether their prompts are read or come from the cache."""

import random
from typing import Any

import pytest

from hearth.worker.engine.decode.draft_model import DraftModel
from hearth.worker.schedule.answers.answer_drafts import AnswerDrafts, DraftPolicy, Reach
from scripts.harness.socketless_worker import (
    Answer,
    Machine,
    loaded,
    machine,
    marks,
    vocabulary,
)
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.models.draft_heads import KnowingHead, random_head
from tests.helpers.models.draft_targets import DRAFT_TARGETS, draft_target

NAME = "qwen3_5_vl"
TOKENS = 24
FLAT = {1: 1.0, 8: 1.01}


def drafting(model: DraftModel, reach: Reach = "all") -> Machine:
    policy = DraftPolicy("lookup", reach, "all", curve=FLAT)
    return machine(NAME, drafts=AnswerDrafts(policy, model))


def cold_answer(ids: list[int]) -> Answer:
    cold = machine(NAME, keeps=False)
    cold.drafts.policy = DraftPolicy()
    return cold.ask(ids, TOKENS)


def text(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50, 2900) for _ in range(count)]


def test_a_draft_model_drafts_behind_a_cold_prompt_and_behind_a_kept_one() -> None:
    head, ids = KnowingHead([]), list[int]()
    warm = drafting(DraftModel(head, None))
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


def test_a_random_head_changes_no_answer_beside_others_or_alone() -> None:
    vision = loaded(NAME).vision
    assert vision is not None
    warm = drafting(DraftModel(random_head(loaded(NAME).config), vision.model))
    prompts = [text(seed, 70 + seed) for seed in range(3)]
    answers = [warm.submit(ids, TOKENS) for ids in prompts]
    warm.run()
    for ids, answer in zip(prompts, answers, strict=True):
        same_tokens(warm.settled(answer), cold_answer(ids))
    same_tokens(warm.ask(prompts[0], TOKENS), cold_answer(prompts[0]))
    assert warm.drafts.report()["by_source"]["model"]["drafted"] > 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.night) if at else name
        for at, name in enumerate(DRAFT_TARGETS)
    ],
)
def test_a_conversation_says_what_it_says_cold_whatever_a_draft_model_of_any_kind_drafts(
    name: str,
) -> None:
    target = draft_target(name)

    def of(**how: Any) -> Machine:
        return Machine(target.loaded, marks(NAME), vocabulary(NAME), **how)

    policy = DraftPolicy("lookup", "all", "all", curve=FLAT)
    warm = of(drafts=AnswerDrafts(policy, target.draft_model(target.random_head(1))))
    ids = list[int]()
    for turn in range(3):
        ids = [*ids, *text(turn, 70)]
        answer = warm.ask(ids, TOKENS)
        same_tokens(answer, of(keeps=False).ask(ids, TOKENS))
        assert (answer.cached > 0) == (turn > 0)
        ids += answer.tokens
    assert warm.drafts.report()["by_source"]["model"]["drafted"] > 0
    warm.check()


def test_where_nothing_is_drafted_from_text_a_draft_model_is_not_asked_either() -> None:
    head = KnowingHead([])
    for reach in ("none", "forced"):
        still = drafting(DraftModel(head, None), reach)
        ids = text(1, 40)
        same_tokens(still.ask(ids, TOKENS), cold_answer(ids))
        assert still.drafts.report()["by_source"]["model"]["drafted"] == 0
    assert not head.begun

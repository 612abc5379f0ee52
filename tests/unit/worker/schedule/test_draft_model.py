"""A draft model drafts for requests, whether their prompts are read or come from the cache."""

import random

from hearth.worker.engine.decode.draft_model import DraftModel
from hearth.worker.schedule.answers.answer_drafts import AnswerDrafts, DraftPolicy, Reach
from scripts.harness.socketless_worker import (
    Answer,
    Machine,
    machine,
)
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.models.draft_heads import KnowingHead

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


def test_where_nothing_is_drafted_from_text_a_draft_model_is_not_asked_either() -> None:
    head = KnowingHead([])
    for reach in ("none", "forced"):
        still = drafting(DraftModel(head, None), reach)
        ids = text(1, 40)
        same_tokens(still.ask(ids, TOKENS), cold_answer(ids))
        assert still.drafts.report()["by_source"]["model"]["drafted"] == 0
    assert not head.begun

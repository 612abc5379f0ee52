"""Whatever an MTP head drafts, tokens are those of plain decoding; a right one saves forwards."""

import functools
import itertools
from collections.abc import Sequence as TypedSequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st

from hearth.worker.draft.answer_drafter import AnswerDrafter, AnswerSources
from hearth.worker.draft.draft_length import DraftLength
from hearth.worker.engine.decode import draft_model
from hearth.worker.engine.decode.draft_model import PENDING_MAX, DraftModel, HeadDrafts
from scripts.harness.socketless_worker import loaded
from tests.helpers.models.draft_heads import (
    AskingDrafter,
    KnowingHead,
    LyingDrafts,
    random_head,
)
from tests.helpers.models.drafted_answers import DraftedAnswers
from tests.helpers.models.drafted_decoding import (
    SAMPLINGS,
    any_prompt,
)

NAME = "qwen3_5_vl"
TOKENS = 40
PROMPT = any_prompt(12)


def model() -> Any:
    return loaded(NAME).model


@functools.cache
def heads(seed: int) -> DraftModel:
    vision = loaded(NAME).vision
    assert vision is not None
    return DraftModel(random_head(loaded(NAME).config, seed), vision.model)


def knowing(text: TypedSequence[int]) -> tuple[KnowingHead, HeadDrafts]:
    """Return a head that knows a text, and what drafts with it: a copy, which reads into it."""
    head = KnowingHead(text)
    return head, DraftModel(head, None).follow()


@functools.cache
def answers() -> DraftedAnswers:
    return DraftedAnswers(model(), PROMPT, TOKENS)


def plain(sampling: str) -> list[int]:
    return answers().plain(sampling)


def drafted(sampling: str, drafter: Any, tail: int = 1) -> list[int]:
    return answers().drafted(sampling, drafter, tail)


@functools.cache
def hidden_states() -> mx.array:
    """Return the hidden states (tokens, hidden) of the prompt and the plain greedy answer."""
    text = mx.array([[*PROMPT, *plain("greedy")]])
    _, hidden = model().with_hidden(text, model().make_cache())
    mx.eval(hidden)
    states: mx.array = hidden[0]
    return states


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_a_head_drafts_right_is_accepted_and_saves_forwards(sampling: str) -> None:
    truth = plain(sampling)
    head, follower = knowing([*PROMPT, *truth])
    drafter = AskingDrafter(follower, len(PROMPT), (4,))
    assert drafted(sampling, drafter) == truth
    assert drafter.accepted == drafter.drafted >= TOKENS * 3 // 4
    assert head.read


def test_an_answers_drafter_asks_the_head_where_it_promises_most_and_counts_what_came_of_it() -> (
    None
):
    truth = plain("greedy")
    _, follower = knowing([*PROMPT, *truth])
    length = DraftLength({1: 1.0, 8: 1.01})
    drafter = AnswerDrafter(AnswerSources(PROMPT, model=follower), length, lambda: "text")
    assert drafted("greedy", drafter) == truth
    assert drafter.counts.accepted["model"] >= TOKENS // 2
    assert drafter.counts.forwards < TOKENS // 2


def test_a_random_head_is_soon_asked_no_more_and_changes_no_token() -> None:
    length = DraftLength({1: 1.0, 8: 1.2})
    sources = AnswerSources(PROMPT, model=heads(1).follow())
    drafter = AnswerDrafter(sources, length, lambda: "text")
    assert drafted("greedy", drafter) == plain("greedy")
    assert 0 < drafter.counts.drafted["model"] <= 8


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    tail=st.integers(1, 6),
    lies=st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS),
)
def test_a_head_reads_each_known_token_once_with_the_models_own_hidden_state(
    lengths: list[int], tail: int, lies: list[bool]
) -> None:
    truth = plain("greedy")
    head, follower = knowing([*PROMPT, *truth])
    lying = LyingDrafts(follower, lies, len(PROMPT))
    drafter = AskingDrafter(lying, len(PROMPT), lengths)
    assert drafted("greedy", drafter, tail) == truth
    assert len(head.begun) <= 1
    if head.read:
        places = [place for place, _ in head.read]
        assert places == list(range(len(PROMPT) - tail, places[-1] + 1))
        read = mx.stack([hidden for _, hidden in head.read])
        assert mx.allclose(read, hidden_states()[places[0] : places[-1] + 1], atol=1e-3).item()


def test_two_sequences_that_draft_by_turns_each_have_a_head_of_their_own() -> None:
    prompts = {"x": PROMPT, "y": PROMPT[::-1]}

    def drafts_of(*keys: str) -> list[list[list[int]]]:
        decoder = answers().decoder()
        drafters = []
        for key in keys:
            drafters.append(AskingDrafter(heads(1).follow(), len(PROMPT), (3,)))
            decoder.add(answers().sequence("greedy", drafters[-1], key, prompt=prompts[key]))
        for _ in range(TOKENS // 4):
            decoder.step()
        return [drafter.drafts for drafter in drafters]

    assert drafts_of("x", "y") == [*drafts_of("x"), *drafts_of("y")]


def test_a_head_that_was_long_not_asked_begins_anew_with_the_last_tokens() -> None:
    text = [*PROMPT, *range(900)]
    head, follower = knowing(text)
    for at in range(700):
        follower.take(at, mx.array(text[at : at + 1]), mx.zeros((1, 1, 4)))
    assert follower.draft(700, text[700], 3) == text[701:704]
    assert [place for place, _ in head.read] == list(range(700 - PENDING_MAX, 700))


def test_a_forward_longer_than_what_waits_leaves_its_last_tokens() -> None:
    text = list(range(900))
    head, follower = knowing(text)
    follower.take(0, mx.array(text[:700]), mx.zeros((1, 700, 4)))
    assert follower.draft(700, text[700], 2) == text[701:703]
    assert len(head.read) == PENDING_MAX


def test_what_waits_of_a_prompt_is_dropped_once_as_much_is_known_behind_it() -> None:
    text = list(range(2000))
    for behind in (1, PENDING_MAX - 1, PENDING_MAX):
        head, follower = knowing(text)
        follower.take(0, mx.array(text[:300]), mx.zeros((1, 300, 4)))
        for at in range(300, 300 + behind):
            follower.take(at, mx.array(text[at : at + 1]), mx.zeros((1, 1, 4)))
        assert follower.draft(300 + behind, text[300 + behind], 2)
        assert head.begun == [0 if behind < PENDING_MAX else 300]


def test_a_head_that_misses_the_last_tokens_drafts_nothing() -> None:
    _, follower = knowing(PROMPT)
    assert follower.draft(5, PROMPT[5], 2) == []
    follower.take(0, mx.array(PROMPT[:4]), mx.zeros((1, 4, 4)))
    assert follower.draft(5, PROMPT[5], 2) == []
    assert follower.draft(4, PROMPT[4], 2) == PROMPT[5:7]


def test_a_head_begins_anew_before_it_holds_more_than_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_model, "HELD_MAX", 10)
    text = list(range(100))
    head, follower = knowing(text)
    for at in range(25):
        follower.take(at, mx.array([text[at]]), mx.zeros((1, 1, 4)))
        assert follower.draft(at + 1, text[at + 1], 2) == text[at + 2 : at + 4]
        assert follower.held <= 10
    assert head.begun == [0, 10, 20]


def test_what_a_drafted_token_costs_is_measured_against_a_forward() -> None:
    """By this clock a forward takes 2 seconds and four drafted tokens 3, or longer."""
    spans = [9.0, 1.0, 2.0, 4.0, 5.0, 3.0, 3.0, 8.0]  # the first forward and draft do not count
    times = itertools.accumulate(itertools.chain(*((span, 0.0) for span in spans)), initial=0.0)
    measured = DraftModel(heads(1).head, heads(1).target)
    measured.measure(model(), clock=lambda: next(times))
    assert measured.token_cost == pytest.approx(3 / 4 / 2)

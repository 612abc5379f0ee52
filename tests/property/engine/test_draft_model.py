"""Whatever a draft model drafts, tokens are those of plain decoding; a right one saves forwards."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_vlm.models.cache import KVCache

from hearth.worker.draft.answer_drafter import AnswerDrafter, AnswerSources
from hearth.worker.draft.draft_length import DraftLength
from hearth.worker.engine.decode import draft_model
from hearth.worker.engine.decode.draft_model import (
    PENDING_MAX,
    DraftModel,
    HeadDrafts,
    is_like_alone,
    with_hidden,
)
from hearth.worker.engine.engine import Engine
from scripts.harness.socketless_worker import loaded
from tests.helpers.by_day import by_day
from tests.helpers.models.draft_heads import (
    AskingDrafter,
    KnowingAssistant,
    KnowingHead,
    LyingDrafts,
    random_head,
)
from tests.helpers.models.draft_targets import DRAFT_TARGETS, WINDOW, draft_target
from tests.helpers.models.drafted_answers import DraftedAnswers
from tests.helpers.models.drafted_decoding import SAMPLINGS, any_prompt

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


def knowing_head(text: Sequence[int]) -> tuple[KnowingHead, HeadDrafts]:
    """Return a head that knows a text, and what drafts with it: a copy, which reads into it."""
    head = KnowingHead(text)
    return head, DraftModel(head, None).follow()


@functools.cache
def head_answers() -> DraftedAnswers:
    return DraftedAnswers(model(), PROMPT, TOKENS)


@functools.cache
def hidden_states() -> mx.array:
    """Return the hidden states (tokens, hidden) of the prompt and the plain greedy answer."""
    text = mx.array([[*PROMPT, *head_answers().plain("greedy")]])
    _, hidden = model().with_hidden(text, model().make_cache())
    mx.eval(hidden)
    states: mx.array = hidden[0]
    return states


def test_an_answers_drafter_asks_the_head_where_it_promises_most_and_counts_what_came_of_it() -> (
    None
):
    truth = head_answers().plain("greedy")
    _, follower = knowing_head([*PROMPT, *truth])
    length = DraftLength({1: 1.0, 8: 1.01})
    drafter = AnswerDrafter(AnswerSources(PROMPT, model=follower), length, lambda: "text")
    assert head_answers().drafted("greedy", drafter) == truth
    assert drafter.counts.accepted["model"] >= TOKENS // 2
    assert drafter.counts.forwards < TOKENS // 2


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    tail=st.integers(1, 6),
    lies=st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS),
)
def test_a_head_reads_each_known_token_once_with_the_models_own_hidden_state(
    lengths: list[int], tail: int, lies: list[bool]
) -> None:
    truth = head_answers().plain("greedy")
    head, follower = knowing_head([*PROMPT, *truth])
    lying = LyingDrafts(follower, lies, len(PROMPT))
    drafter = AskingDrafter(lying, len(PROMPT), lengths)
    assert head_answers().drafted("greedy", drafter, tail) == truth
    assert len(head.begun) <= 1
    if head.read:
        places = [place for place, _ in head.read]
        assert places == list(range(len(PROMPT) - tail, places[-1] + 1))
        read = mx.stack([hidden for _, hidden in head.read])
        assert mx.allclose(read, hidden_states()[places[0] : places[-1] + 1], atol=1e-3).item()


def test_two_sequences_that_draft_by_turns_each_have_a_head_of_their_own() -> None:
    prompts = {"x": PROMPT, "y": PROMPT[::-1]}

    def drafts_of(*keys: str) -> list[list[list[int]]]:
        decoder = head_answers().decoder()
        drafters = []
        for key in keys:
            drafters.append(AskingDrafter(heads(1).follow(), len(PROMPT), (3,)))
            decoder.add(head_answers().sequence("greedy", drafters[-1], key, prompt=prompts[key]))
        for _ in range(TOKENS // 4):
            decoder.step()
        return [drafter.drafts for drafter in drafters]

    assert drafts_of("x", "y") == [*drafts_of("x"), *drafts_of("y")]


def test_a_head_that_was_long_not_asked_begins_anew_with_the_last_tokens() -> None:
    text = [*PROMPT, *range(900)]
    head, follower = knowing_head(text)
    for at in range(700):
        follower.take(at, mx.array(text[at : at + 1]), mx.zeros((1, 1, 4)))
    assert follower.draft(700, text[700], 3) == text[701:704]
    assert [place for place, _ in head.read] == list(range(700 - PENDING_MAX, 700))


def test_a_forward_longer_than_what_waits_leaves_its_last_tokens() -> None:
    text = list(range(900))
    head, follower = knowing_head(text)
    follower.take(0, mx.array(text[:700]), mx.zeros((1, 700, 4)))
    assert follower.draft(700, text[700], 2) == text[701:703]
    assert len(head.read) == PENDING_MAX


def test_what_waits_of_a_prompt_is_dropped_once_as_much_is_known_behind_it() -> None:
    text = list(range(2000))
    for behind in (1, PENDING_MAX - 1, PENDING_MAX):
        head, follower = knowing_head(text)
        follower.take(0, mx.array(text[:300]), mx.zeros((1, 300, 4)))
        for at in range(300, 300 + behind):
            follower.take(at, mx.array(text[at : at + 1]), mx.zeros((1, 1, 4)))
        assert follower.draft(300 + behind, text[300 + behind], 2)
        assert head.begun == [0 if behind < PENDING_MAX else 300]


def test_a_head_that_misses_the_last_tokens_drafts_nothing() -> None:
    _, follower = knowing_head(PROMPT)
    assert follower.draft(5, PROMPT[5], 2) == []
    follower.take(0, mx.array(PROMPT[:4]), mx.zeros((1, 4, 4)))
    assert follower.draft(5, PROMPT[5], 2) == []
    assert follower.draft(4, PROMPT[4], 2) == PROMPT[5:7]


def test_a_head_begins_anew_before_it_holds_more_than_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_model, "PAIRS_MAX", 10)
    text = list(range(100))
    head, follower = knowing_head(text)
    for at in range(25):
        follower.take(at, mx.array([text[at]]), mx.zeros((1, 1, 4)))
        assert follower.draft(at + 1, text[at + 1], 2) == text[at + 2 : at + 4]
        assert follower.read_count <= 10
    assert head.begun == [0, 10, 20]


def test_what_a_drafted_token_costs_is_measured_against_a_forward() -> None:
    """By this clock a forward takes 2 seconds and four drafted tokens 3, or longer."""
    spans = [9.0, 1.0, 2.0, 4.0, 5.0, 3.0, 3.0, 8.0]  # the first forward and draft do not count
    times = itertools.accumulate(itertools.chain(*((span, 0.0) for span in spans)), initial=0.0)
    measured = DraftModel(heads(1).head, heads(1).target)
    measured.measure(model(), clock=lambda: next(times))
    assert measured.token_cost == pytest.approx(3 / 4 / 2)


LENGTHS = {"short": 9, "past a window": 3 * WINDOW}
ASSISTANTS = [name for name in DRAFT_TARGETS if name.startswith("gemma4")]
DAY = ("qwen3_5_mtp", "gemma4_assistant")  # a head, and one that is shown the model's own KV
NAMES = by_day(DRAFT_TARGETS, DAY)


@functools.cache
def answers(name: str, length: int) -> DraftedAnswers:
    return DraftedAnswers(draft_target(name).loaded.model, any_prompt(length))


@functools.cache
def head(name: str, seed: int) -> Any:
    return draft_target(name).random_head(seed)


def asking(name: str, length: int, lengths: Sequence[int], seed: int = 1) -> AskingDrafter:
    follower = draft_target(name).draft_model(head(name, seed)).follow()
    return AskingDrafter(follower, length, lengths)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_drafted_the_tokens_are_those_of_plain_decoding(
    name: str, length: int, sampling: str
) -> None:
    of = answers(name, length)
    lengths, tail = ((4,), 1) if length < WINDOW else ((1, 7, 0, 3), 5)
    drafter = asking(name, length, lengths)
    of.assert_said(sampling, of.drafted(sampling, drafter, tail))
    assert drafter.drafted and not drafter.refused


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_read_to_the_same_bits_whether_a_draft_model_is_shown_it_or_not(
    name: str,
) -> None:
    engine = Engine(draft_target(name).loaded)
    ids, alone, shown = any_prompt(90), engine.new_cache(), engine.new_cache()
    for start in range(0, 90, 45):
        chunk = ids[start : start + 45]
        engine.prefill(alone, chunk)
        hidden = engine.prefill_with_hidden(shown, chunk, (), tokens_max=20)
        _, expected = engine_hidden(name, ids[: start + 45])
        assert mx.allclose(hidden, expected[:, -20:], atol=1e-2).item()
    states = [tree_flatten([layer.state for layer in cache]) for cache in (alone, shown)]
    for (_, one), (_, other) in zip(*states, strict=True):
        assert one is other is None or mx.array_equal(one, other).item()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_same_to_the_bit_with_hidden_states_beside_them(name: str) -> None:
    assert is_like_alone(draft_target(name).loaded.model)


def engine_hidden(name: str, ids: list[int]) -> tuple[mx.array, mx.array]:
    model = draft_target(name).loaded.model
    return with_hidden(model, mx.array([ids]), make_prompt_cache(model))


@settings(max_examples=5)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    tail=st.integers(1, 6),
    lies=st.lists(st.booleans(), min_size=40, max_size=40),
)
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", by_day(ASSISTANTS, DAY))
def test_an_assistant_is_shown_the_models_kv_of_all_known_tokens_and_of_no_other(
    name: str, length: int, lengths: list[int], tail: int, lies: list[bool]
) -> None:
    of = answers(name, length)
    text = [*of.prompt, *of.plain("greedy")]
    knowing = KnowingAssistant(text)
    lying = LyingDrafts(draft_target(name).draft_model(knowing).follow(), lies, length)
    drafter = AskingDrafter(lying, length, lengths)
    assert of.drafted("greedy", drafter, tail) == of.plain("greedy")
    assert not drafter.refused
    hidden, whole = hidden_and_kv(name, length)
    for (place, shown), last in zip(knowing.shown, knowing.hidden, strict=True):
        assert mx.allclose(last[0, 0], hidden[place - 1], atol=1e-2).item()
        assert shown["full_attention"][0].shape[2] == place
        assert min(place, WINDOW) <= shown["sliding_attention"][0].shape[2] <= WINDOW + 7
        for layer_type, pair in shown.items():
            for rows, known in zip(pair, whole[layer_type], strict=True):
                same = known[..., place - rows.shape[2] : place, :]
                assert mx.allclose(rows, same, atol=1e-2).item(), (place, layer_type)


def test_an_assistant_drafts_nothing_where_kv_is_packed_or_not_shown() -> None:
    of = answers(ASSISTANTS[0], 9)
    knowing = KnowingAssistant([*of.prompt, *of.plain("greedy")])
    drafts = draft_target(ASSISTANTS[0]).draft_model(knowing).follow()
    cache = make_prompt_cache(of.model)
    _, hidden = with_hidden(of.model, mx.array([of.prompt]), cache)
    drafts.take(0, mx.array(of.prompt), hidden)
    last, after = of.plain("greedy")[:2]
    assert drafts.draft(9, last, 1) == []
    drafts.look_at(cache)
    assert drafts.draft(9, last, 1) == [after]
    assert knowing.place is None, "it would have the buffers copied that are written next"
    assert drafts.draft(8, of.prompt[8], 1) == []
    assert drafts.draft(9, last, 0) == []
    packed = [layer.to_quantized(32, 4) if type(layer) is KVCache else layer for layer in cache]
    assert packed != cache
    drafts.look_at(packed)
    assert drafts.draft(9, last, 1) == []
    drafts.look_at(None)
    assert drafts.draft(9, last, 1) == []


@functools.cache
def hidden_and_kv(name: str, length: int) -> tuple[mx.array, dict[str, tuple[mx.array, mx.array]]]:
    """Return the hidden states (tokens, hidden) and the KV of the prompt and the greedy answer.

    A first forward leaves all its rows in windows too, in order.
    """
    of = answers(name, length)
    text = mx.array([[*of.prompt, *of.plain("greedy")]])
    cache = make_prompt_cache(of.model)
    _, hidden = with_hidden(of.model, text, cache)
    model = draft_target(name).model
    language = getattr(model, "language_model", model)
    last = {layer.layer_type: kept for layer, kept in zip(language.layers, cache, strict=False)}
    rows = text.shape[1]
    kv = {
        kind: (kept.keys[..., :rows, :], kept.values[..., :rows, :]) for kind, kept in last.items()
    }
    mx.eval(hidden, kv)
    return hidden[0], kv


@settings(max_examples=6)
@given(
    said=st.integers(1, 39),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    knows=st.booleans(),
)
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_ends_anywhere_in_a_draft_leaves_what_was_said_and_no_more(
    name: str, said: int, lengths: list[int], knows: bool
) -> None:
    drafter = knowing(name, lengths) if knows else asking(name, 9, lengths)
    answers(name, 9).assert_left(drafter, said, atol=1e-2)


def knowing(name: str, lengths: Sequence[int]) -> AskingDrafter:
    """Return a drafter that is right; a head that knows need not be of the model's own kind."""
    of = answers(name, 9)
    text = [*of.prompt, *of.plain("greedy")]
    known = KnowingAssistant(text) if name in ASSISTANTS else KnowingHead(text)
    return AskingDrafter(draft_target(name).draft_model(known).follow(), 9, lengths)


@settings(max_examples=4)
@given(moves=st.lists(st.integers(0, 4), min_size=1, max_size=5), knows=st.booleans())
@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_may_join_a_batch_and_goes_on_drafting_behind_it(
    name: str, moves: list[int], knows: bool
) -> None:
    of = answers(name, 9)
    drafter = knowing(name, [3, 7]) if knows else asking(name, 9, (3, 7))
    before: list[tuple[int, int]] = []  # tokens drafted and said as each guest came

    def note() -> None:
        before.append((drafter.drafted, len(drafter.taken)))

    assert of.said_beside_guests(drafter, moves, note) == of.plain("greedy")
    drafted, said = before[-1]
    has_much_left = of.tokens - said > moves[-1] + 5
    assert drafter.drafted > drafted or not has_much_left, "it drafts again once it is alone"

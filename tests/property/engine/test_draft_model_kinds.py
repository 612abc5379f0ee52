"""Each kind of draft model drafts what mlx-vlm's own loop would, and changes no token."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_vlm.models.cache import KVCache

from hearth.worker.engine.engine import Engine
from hearth.worker.engine.hidden_states import is_like_alone, with_hidden
from tests.helpers.models.by_day import by_day
from tests.helpers.models.draft_heads import (
    AskingDrafter,
    KnowingAssistant,
    KnowingHead,
    LyingDrafts,
)
from tests.helpers.models.draft_targets import (
    DRAFT_TARGETS,
    TEXT_ALONE,
    WINDOW,
    DraftTarget,
    draft_target,
)
from tests.helpers.models.drafted_answers import DraftedAnswers
from tests.helpers.models.drafted_decoding import (
    SAMPLINGS,
    any_prompt,
)

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


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", by_day((n for n in DRAFT_TARGETS if n not in TEXT_ALONE), DAY))
def test_a_draft_model_drafts_what_it_does_in_mlx_vlms_own_loop(name: str, length: int) -> None:
    # Of Qwen's prompts mlx-vlm's loop shows the head the last token alone.
    of = replace(answers(name, length), is_prompt_shown=name != "qwen3_5_mtp")
    expected = drafted_by_mlx_vlm(draft_target(name), head(name, 1), of.prompt, of.tokens)
    drafter = asking(name, length, (3,))
    assert of.drafted("greedy", drafter) == of.plain("greedy")
    assert not drafter.accepted, "behind a right token a head of mlx-vlm keeps its own states"
    drafts = dict(zip(drafter.places, drafter.drafts, strict=True))
    compared = [place for place in drafts if place < length + of.tokens - 4]
    assert len(compared) > of.tokens // 2
    # On models with states, tokens that wait leave less room.
    differing = [at for at in compared if drafts[at] != expected[at - length][: len(drafts[at])]]
    # Behind that mlx-vlm's windows have a row more or less, which is theirs to mask.
    is_past = name in ASSISTANTS and all(place >= WINDOW for place in differing)
    assert len(differing) <= (2 if is_past else 0), differing


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


def drafted_by_mlx_vlm(
    target: DraftTarget, model: Any, ids: list[int], tokens: int
) -> list[list[int]]:
    """Return the drafts of three tokens that mlx-vlm's loop verifies, greedily."""
    from mlx_vlm.generate import generate_step

    drafts: list[list[int]] = []
    spied = copy.copy(model)

    def draft_block(*arguments: Any, **named: Any) -> mx.array:
        drafted: mx.array = model.__class__.draft_block(spied, *arguments, **named)
        drafts.append(drafted[0].tolist())  # type: ignore[arg-type]
        return drafted

    spied.draft_block = draft_block
    options = dict(draft_model=spied, draft_kind="mtp", draft_block_size=4, temperature=0.0)
    answer = generate_step(mx.array([ids]), target.model, None, None, max_tokens=tokens, **options)
    assert len(list(answer)) == tokens
    return drafts

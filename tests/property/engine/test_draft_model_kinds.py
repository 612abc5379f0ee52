"""Each kind of draft model drafts what mlx-vlm's own loop would, and changes no token."""

import copy
import functools
from typing import Any

import mlx.core as mx
import pytest

from tests.helpers.models.draft_heads import AskingDrafter
from tests.helpers.models.draft_targets import DRAFT_TARGETS, WINDOW, DraftTarget, draft_target
from tests.helpers.models.drafted_answers import SAMPLINGS, DraftedAnswers, prompt

LENGTHS = {"short": 9, "past a window": 3 * WINDOW}
ASSISTANTS = [name for name in DRAFT_TARGETS if name.startswith("gemma4")]


@functools.cache
def answers(name: str, length: int) -> DraftedAnswers:
    return DraftedAnswers(draft_target(name).loaded.model, prompt(length))


@functools.cache
def head(name: str, seed: int) -> Any:
    return draft_target(name).random_head(seed)


def asking(name: str, length: int, lengths: tuple[int, ...], seed: int = 1) -> AskingDrafter:
    follower = draft_target(name).draft_model(head(name, seed)).follow()
    return AskingDrafter(follower, length, lengths)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", DRAFT_TARGETS)
def test_whatever_is_drafted_the_tokens_are_those_of_plain_decoding(
    name: str, length: int, sampling: str
) -> None:
    of = answers(name, length)
    for lengths, tail in (((4,), 1), ((1, 7, 0, 3), 5)):
        drafter = asking(name, length, lengths)
        assert of.drafted(sampling, drafter, tail) == of.plain(sampling)
        assert drafter.drafted and not drafter.refused


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", ASSISTANTS)
def test_an_assistant_drafts_what_it_does_in_mlx_vlms_own_loop(name: str, length: int) -> None:
    of = answers(name, length)
    expected = drafted_by_mlx_vlm(draft_target(name), head(name, 1), of.prompt, of.tokens)
    drafter = asking(name, length, (3,))
    of.drafted("greedy", drafter)
    rounds = min(len(drafter.drafts), len(expected))
    assert rounds >= of.tokens // 2
    assert drafter.drafts[:rounds] == expected[:rounds]


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
    assert target.loaded.vision is not None
    options = dict(draft_model=spied, draft_kind="mtp", draft_block_size=4, temperature=0.0)
    answer = generate_step(
        mx.array([ids]), target.loaded.vision.model, None, None, max_tokens=tokens, **options
    )
    assert len(list(answer)) == tokens
    return drafts

"""Eight branches on one trunk: bytes, logits, and who is left when one goes."""

import functools
import logging
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from hearth.worker.engine.decode.batch_split import ReadCost
from hearth.worker.engine.decode.decoder import Decoder, Sequence
from hearth.worker.engine.decode.sampler import TokenChoice, greedy
from hearth.worker.engine.decode.trunk_attention import reach_trunks
from hearth.worker.engine.decode.trunk_plan import TRUNK_TOKENS_MIN
from hearth.worker.engine.engine import Engine
from scripts.harness.socketless_worker import loaded
from tests.helpers.models.counted_model import CountedModel, counted, is_on_trunk

BRANCHES, STEPS, CHUNK = 8, 7, 512
READ_MAX = 5_000  # tokens; KV of more is made up, as reading them takes minutes
CLOSE = 3e-4  # of logits, in fp32
CHOICE = TokenChoice(sampler=greedy, processors=(), top_logprobs=1)


@functools.cache
def engine(name: str) -> Engine:
    return Engine(loaded(name))


def trunk_ids(count: int) -> list[int]:
    return [(n * 7919 + 13) % 2900 + 50 for n in range(count)]


@functools.cache
def trunk_cache(name: str, count: int) -> list[Any]:
    cache = make_prompt_cache(loaded(name).model)
    ids = trunk_ids(count)
    if count > READ_MAX:
        engine(name).prefill(cache, ids[:CHUNK])
        mx.random.seed(1)
        for layer in cache:
            more = (*layer.keys.shape[:2], count - CHUNK, layer.keys.shape[3])
            layer.update_and_fetch(mx.random.normal(more), mx.random.normal(more))
        mx.eval([layer.state for layer in cache])
        return cache
    for start in range(0, count, CHUNK):
        engine(name).prefill(cache, ids[start : start + CHUNK])
    return cache


def branch(name: str, trunk: int, number: int, lineage: str | None = "a") -> Sequence:
    """Return a sequence with a few tokens of its own, in a cache of its own, as a fork's is."""
    cache = make_prompt_cache(loaded(name).model)
    with mx.stream(generation_stream):
        for own, other in zip(cache, trunk_cache(name, trunk), strict=True):
            own.state = tree_map(
                lambda one: one[:] if isinstance(one, mx.array) else one, other.state
            )
        tail = [60 + number + 3 * n for n in range(5 + 4 * number)]
        engine(name).prefill(cache, tail[:-1])
    tokens = trunk_ids(trunk) + tail[:-1]
    return Sequence(f"r{number}", cache, tokens, tail[-1:], CHOICE, 40, lineage=lineage)


def decoder_of(name: str, trunk: int, lineage: str | None = "a") -> Decoder:
    made = Engine(loaded(name)).decoder
    assert made.trunk_tokens_min == TRUNK_TOKENS_MIN
    for number in range(BRANCHES):
        made.add(branch(name, trunk, number, lineage))
    return made


def said(decoder: Decoder, steps: int) -> list[dict[str, tuple[int, mx.array]]]:
    return [
        {one.key: (one.token_id, one.logprobs) for one in decoder.step()}  # type: ignore[misc]
        for _ in range(steps)
    ]


def difference(one: list[Any], other: list[Any]) -> float:
    """Return how unlike logits are that both have."""
    return max(
        float(mx.abs(step[key][1] - beside[key][1]).max())
        for step, beside in zip(one, other, strict=True)
        for key in step.keys() & beside.keys()
    )


@pytest.mark.parametrize(
    ("name", "trunk"),
    [
        *((name, 4_096) for name in ("qwen3", "llama", "gpt_oss", "qwen3_5")),
        ("qwen3", 16_384),
    ],
)
def test_eight_branches_hold_one_trunk_and_their_tails_and_say_what_copies_say(
    name: str, trunk: int
) -> None:
    copies = decoder_of(name, trunk, lineage=None)
    expected = said(copies, STEPS)
    shared = decoder_of(name, trunk)
    got = said(shared, STEPS)
    assert not copies.trunks and len(set(shared.trunks.values())) == 1
    assert len(shared.trunks) == BRANCHES
    assert difference(got, expected) < CLOSE
    assert [{key: one[key][0] for key in one} for one in got] == [
        {key: one[key][0] for key in one} for one in expected
    ]
    (on,) = set(shared.trunks.values())
    assert on.length == trunk
    a_token = on.nbytes / trunk
    rows = [row for batch in shared._batches for row in batch.rows]
    tails = sum(row.own_length for row in rows) * a_token
    padding = BRANCHES * max(row.own_length for row in rows) * a_token - tails
    others = sum(
        layer.nbytes
        for batch in shared._batches
        for number, layer in enumerate(batch._layers)
        if number not in on.layers
    )
    assert shared.batch_bytes <= 1.05 * (on.nbytes + tails) + padding + others


def test_what_two_shared_is_let_go_once_they_part() -> None:
    decoder = Engine(loaded("qwen3")).decoder
    for number in range(2):
        decoder.add(branch("qwen3", 2_048, number))
    said(decoder, 2)
    (trunk,) = set(decoder.trunks.values())
    assert trunk.layers
    assert decoder.remove("r0") is not None and not decoder.trunks
    assert not trunk.layers, "it would stand beside the copies of both"


def test_room_is_asked_for_what_is_held_with_the_trunk_once() -> None:
    asked: list[int] = []

    def has_room(nbytes: int) -> bool:
        asked.append(nbytes)
        return True

    for lineage, room in (("a", 0), (None, sum(4 * (7 - n) for n in range(BRANCHES)))):
        asked.clear()
        decoder = decoder_of("qwen3", 2_048, lineage)
        decoder.cost, decoder.has_room = ReadCost(1e9, row_bytes=1), has_room
        said(decoder, 1)
        assert asked == [room], "copies are padded; a trunk frees more than padding takes"


# ---------------------------------------------------------------- when the model is tried

TRIED_AT = 3  # steps that the first branch is alone
TRIAL_FORWARDS = 11


def deciding(name: str, says: bool, asked: list[int]) -> tuple[Decoder, CountedModel]:
    """Return a decoder that notes how many sequences it had when it asked for trunks; its model."""

    def try_trunks() -> bool:
        asked.append(len(made))
        if says:
            reach_trunks(loaded(name).model)
        return says

    stream, model = generation_stream, counted(name).model
    made = Decoder(model, stream, is_mergeable=True, try_trunks=try_trunks)
    return made, model


def said_as_a_fork_comes(decoder: Decoder) -> list[dict[str, tuple[int, mx.array]]]:
    decoder.add(branch("qwen3", 2_048, 0))
    steps = said(decoder, TRIED_AT)
    for number in (1, 2):
        decoder.add(branch("qwen3", 2_048, number))
        steps += said(decoder, 2)
    return steps


def test_trunks_are_tried_once_and_as_the_first_rows_would_share_one() -> None:
    asked: list[int] = []
    decoder, _ = deciding("qwen3", says=False, asked=asked)
    decoder.add(branch("qwen3", 2_048, 0, "a"))
    said(decoder, 2)
    decoder.add(branch("qwen3", 2_048, 1, "b"))
    said(decoder, 2)
    assert len(decoder.batch_keys[0]) == 2 and asked == []
    for number in (2, 3):
        decoder.add(branch("qwen3", 2_048, number, "a"))
        said(decoder, 2)
    assert asked == [3] and not decoder.trunks


def test_what_is_said_before_and_behind_the_trial_is_what_is_said_without_one() -> None:
    model = counted("qwen3")
    tried = Engine(model).decoder
    got = said_as_a_fork_comes(tried)
    told, beside_it = deciding("qwen3", says=True, asked=[])
    expected = said_as_a_fork_comes(told)
    assert len(tried.trunks) == len(told.trunks) == 3
    assert len(model.model.forwards) == len(beside_it.forwards) + TRIAL_FORWARDS
    assert len(got) == len(expected)
    for step, beside in zip(got, expected, strict=True):
        assert step.keys() == beside.keys()
        for key, (token_id, logprobs) in step.items():
            assert token_id == beside[key][0] and mx.array_equal(logprobs, beside[key][1])


def test_a_trial_that_fails_is_told_once_and_rows_keep_copies_from_then_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = counted("qwen3", raises_on=is_on_trunk)
    decoder = Engine(model).decoder
    with caplog.at_level(logging.INFO, "hearth.worker"):
        got = said_as_a_fork_comes(decoder)
        trial = [shape for shape in model.model.forwards if shape[1] > 1]
        decoder.add(branch("qwen3", 2_048, 3))
        said(decoder, 2)
    (record,) = caplog.records
    assert "none share a trunk: it cannot" in record.message
    assert [shape for shape in model.model.forwards if shape[1] > 1] == trial
    assert not decoder.trunks and len(decoder.batch_keys[0]) == 4
    expected = said_as_a_fork_comes(deciding("qwen3", says=False, asked=[])[0])
    assert [{key: one[key][0] for key in one} for one in got] == [
        {key: one[key][0] for key in one} for one in expected
    ]
    assert difference(got, expected) == 0

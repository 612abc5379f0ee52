"""Sequences share a forward or a trunk by what padding costs and by the room there is, once tried.

tests/property/engine/test_decoder_schedules.py holds that joining and leaving change no token.
"""

import functools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from hearth.worker.engine.decode.batch_split import TRUNK_TOKENS_MIN, ReadCost
from hearth.worker.engine.decode.decoder import Decoder, DecodingSequence
from hearth.worker.engine.decode.sampler import SamplingParams, greedy
from hearth.worker.engine.decode.trunk_attention import reach_trunks
from hearth.worker.engine.engine import Engine
from scripts.harness.socketless_worker import loaded
from tests.helpers.models.counted_model import CountedModel, counted

GREEDY = SamplingParams(sampler=greedy, processors=(), top_logprobs=None)
WEIGHTS = ReadCost(weight_bytes=1e9, row_bytes=1)  # which nobody would read twice


def sequence(key: str, length: int, **more: Any) -> DecodingSequence:
    model = loaded("qwen3", tiny=True).model
    ids, cache = list(range(20, 20 + length)), make_prompt_cache(model)
    with mx.stream(generation_stream):
        model(mx.array(ids[:-1])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
    return DecodingSequence(key, cache, ids[:-1], ids[-1:], GREEDY, 40, **more)


def decoder_of(lengths: Mapping[str, int], cost: ReadCost = WEIGHTS) -> Decoder:
    decoder = Decoder(loaded("qwen3", tiny=True).model, generation_stream, is_mergeable=True)
    decoder.cost = cost
    for key, length in lengths.items():
        decoder.add(sequence(key, length))
    return decoder


def test_a_long_row_and_a_short_one_share_no_batch_where_padding_costs_more_than_weights() -> None:
    lengths = {"long": 600, "short": 9, "longer": 900, "shorter": 12}
    decoder = decoder_of(lengths, ReadCost(weight_bytes=700, row_bytes=1))
    decoder.step()
    assert sorted(map(sorted, decoder.batch_request_ids)) == [
        ["long", "longer"],
        ["short", "shorter"],
    ]


def test_where_padding_to_the_longest_has_no_room_the_others_share_a_batch() -> None:
    asked: list[int] = []

    def has_room(nbytes: int) -> bool:
        asked.append(nbytes)
        return nbytes <= 100

    decoder = decoder_of({"a": 9, "long": 900, "b": 12, "c": 10})
    decoder.has_room = has_room
    decoder.step()
    assert decoder.batch_request_ids == [{"a", "b", "c"}] and len(decoder) == 4
    assert max(asked) >= 2 * 888, "it was asked for all of them first"


def test_a_batch_that_others_find_no_room_in_stays_as_it_is() -> None:
    decoder = decoder_of({"a": 20, "b": 20})
    decoder.step()
    decoder.has_room = lambda _nbytes: False
    decoder.add(sequence("long", 400))
    for _ in range(3):
        decoder.step()
    assert decoder.batch_request_ids == [{"a", "b"}] and len(decoder) == 3


def test_what_joining_copies_is_asked_for_too() -> None:
    decoder = decoder_of({})
    decoder.has_room = lambda nbytes: nbytes <= 100
    for key, nbytes in (("a", 30), ("b", 70), ("c", 20)):
        decoder.add(sequence(key, 20, join_bytes=lambda nbytes=nbytes: nbytes))
    decoder.step()
    assert decoder.batch_request_ids == [{"a", "c"}], "all three copy 120 bytes"
    decoder.has_room = lambda nbytes: nbytes <= 10
    decoder.add(sequence("d", 20))
    decoder.step()
    assert "d" in decoder.batch_request_ids[0], "who is in a batch has copied"


def test_removing_what_is_not_there_does_nothing() -> None:
    decoder = decoder_of({})
    assert decoder.remove("nobody") is None
    assert decoder.step() == []


NAME, TRUNK, BRANCHES, CHUNK = "qwen3", TRUNK_TOKENS_MIN, 8, 512
IDS = [(n * 7919 + 13) % 2900 + 50 for n in range(TRUNK)]
CHOICE = SamplingParams(sampler=greedy, processors=(), top_logprobs=1)

Said = list[dict[str, tuple[int, mx.array]]]


@functools.cache
def trunk_cache() -> list[Any]:
    cache = make_prompt_cache(loaded(NAME).model)
    for start in range(0, TRUNK, CHUNK):
        Engine(loaded(NAME)).prefill(cache, IDS[start : start + CHUNK])
    return cache


def branch(number: int, lineage: str | None = "a") -> DecodingSequence:
    """Return a sequence with a few tokens of its own, in a cache of its own, as a fork's is."""
    cache = make_prompt_cache(loaded(NAME).model)
    with mx.stream(generation_stream):
        for own, other in zip(cache, trunk_cache(), strict=True):
            own.state = tuple(one[:] if isinstance(one, mx.array) else one for one in other.state)
        tail = [60 + number + 3 * n for n in range(5 + 4 * number)]
        Engine(loaded(NAME)).prefill(cache, tail[:-1])
    return DecodingSequence(
        f"r{number}", cache, IDS + tail[:-1], tail[-1:], CHOICE, 40, lineage=lineage
    )


def branches_of(count: int, lineage: str | None = "a") -> Decoder:
    made = Engine(loaded(NAME)).decoder
    for number in range(count):
        made.add(branch(number, lineage))
    return made


def said(decoder: Decoder, steps: int) -> Said:
    return [
        {one.request_id: (one.token_id, one.logprobs) for one in decoder.step()}  # type: ignore[misc]
        for _ in range(steps)
    ]


def test_eight_branches_hold_one_trunk_and_their_tails() -> None:
    decoder = branches_of(BRANCHES)
    said(decoder, 2)
    (on,) = set(decoder.trunks.values())
    assert (on.length, len(decoder.trunks)) == (TRUNK, BRANCHES)
    longest = 5 + 4 * (BRANCHES - 1) + 2  # to which the other tails are padded
    tails = BRANCHES * longest * on.nbytes / TRUNK
    assert on.nbytes < decoder.batch_bytes <= 1.2 * on.nbytes + tails


def test_what_two_shared_is_let_go_once_they_part() -> None:
    decoder = branches_of(2)
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
        decoder = branches_of(BRANCHES, lineage)
        decoder.cost, decoder.has_room = ReadCost(1e9, row_bytes=1), has_room
        said(decoder, 1)
        assert asked == [room], "copies are padded; a trunk frees more than padding takes"


# ---------------------------------------------------------------- when the model is tried

TRIAL_FORWARDS = 11


def deciding(says: bool, asked: list[int]) -> tuple[Decoder, CountedModel]:
    """Return a decoder that notes how many sequences it had when it asked for trunks; its model."""

    def try_trunks() -> bool:
        asked.append(len(made))
        if says:
            reach_trunks(loaded(NAME).model)
        return says

    model = counted(NAME).model
    made = Decoder(model, generation_stream, is_mergeable=True, try_trunks=try_trunks)
    return made, model


def said_as_a_fork_comes(decoder: Decoder) -> Said:
    decoder.add(branch(0))
    steps = said(decoder, 3)
    for number in (1, 2):
        decoder.add(branch(number))
        steps += said(decoder, 2)
    return steps


def test_trunks_are_tried_once_and_as_the_first_rows_would_share_one() -> None:
    asked: list[int] = []
    decoder, _ = deciding(says=False, asked=asked)
    for number, lineage in enumerate("ab"):
        decoder.add(branch(number, lineage))
        said(decoder, 2)
    assert len(decoder.batch_request_ids[0]) == 2 and asked == []
    for number in (2, 3):
        decoder.add(branch(number))
        said(decoder, 2)
    assert asked == [3] and not decoder.trunks


def test_what_is_said_before_and_behind_the_trial_is_what_is_said_without_one() -> None:
    model = counted(NAME)
    tried = Engine(model).decoder
    got = said_as_a_fork_comes(tried)
    told, beside_it = deciding(says=True, asked=[])
    expected = said_as_a_fork_comes(told)
    assert len(tried.trunks) == len(told.trunks) == 3
    assert len(model.model.forwards) == len(beside_it.forwards) + TRIAL_FORWARDS
    for step, beside in zip(got, expected, strict=True):
        assert step.keys() == beside.keys()
        for key, (token_id, logprobs) in step.items():
            assert token_id == beside[key][0] and mx.array_equal(logprobs, beside[key][1])

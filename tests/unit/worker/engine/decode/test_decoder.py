"""Who shares a forward: by what padding costs, and by the room there is.

tests/property/engine/test_decoder_schedules.py holds that joining and leaving change no token.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from hearth.worker.engine.decode.batch_split import ReadCost
from hearth.worker.engine.decode.decoder import Decoder, Sequence
from hearth.worker.engine.decode.sampler import TokenChoice, greedy
from scripts.harness.socketless_worker import loaded

GREEDY = TokenChoice(sampler=greedy, processors=(), top_logprobs=None)
WEIGHTS = ReadCost(weight_bytes=1e9, row_bytes=1)  # which nobody would read twice


def sequence(key: str, length: int, **more: Any) -> Sequence:
    model = loaded("qwen3", tiny=True).model
    ids, cache = list(range(20, 20 + length)), make_prompt_cache(model)
    with mx.stream(generation_stream):
        model(mx.array(ids[:-1])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
    return Sequence(key, cache, ids[:-1], ids[-1:], GREEDY, 40, **more)


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
    assert sorted(map(sorted, decoder.batch_keys)) == [["long", "longer"], ["short", "shorter"]]


def test_where_padding_to_the_longest_has_no_room_the_others_share_a_batch() -> None:
    asked: list[int] = []

    def has_room(nbytes: int) -> bool:
        asked.append(nbytes)
        return nbytes <= 100

    decoder = decoder_of({"a": 9, "long": 900, "b": 12, "c": 10})
    decoder.has_room = has_room
    decoder.step()
    assert decoder.batch_keys == [{"a", "b", "c"}] and len(decoder) == 4
    assert max(asked) >= 2 * 888, "it was asked for all of them first"


def test_a_batch_that_others_find_no_room_in_stays_as_it_is() -> None:
    decoder = decoder_of({"a": 20, "b": 20})
    decoder.step()
    decoder.has_room = lambda _nbytes: False
    decoder.add(sequence("long", 400))
    for _ in range(3):
        decoder.step()
    assert decoder.batch_keys == [{"a", "b"}] and len(decoder) == 3


def test_what_joining_copies_is_asked_for_too() -> None:
    decoder = decoder_of({})
    decoder.has_room = lambda nbytes: nbytes <= 100
    for key, nbytes in (("a", 30), ("b", 70), ("c", 20)):
        decoder.add(sequence(key, 20, join_bytes=lambda nbytes=nbytes: nbytes))
    decoder.step()
    assert decoder.batch_keys == [{"a", "c"}], "all three copy 120 bytes"
    decoder.has_room = lambda nbytes: nbytes <= 10
    decoder.add(sequence("d", 20))
    decoder.step()
    assert "d" in decoder.batch_keys[0], "who is in a batch has copied"


def test_removing_what_is_not_there_does_nothing() -> None:
    decoder = decoder_of({})
    assert decoder.remove("nobody") is None
    assert decoder.step() == []

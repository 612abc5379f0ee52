"""Decoding alone and together on real architectures: joining and leaving never change a token."""

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from hearth.worker.engine.decode.batch_split import ReadCost
from hearth.worker.engine.decode.decoder import Decoder, Sequence
from hearth.worker.engine.decode.sampler import TokenChoice, greedy
from scripts.fixtures.fixture_cache import fixture_dir

GREEDY = TokenChoice(sampler=greedy, processors=(), top_logprobs=None)
NAMES = ["qwen3", "qwen3_5", "gpt_oss"]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return load(str(fixture_dir(request.param, tiny=True)))[0]


def sequence(model: Any, key: str, ids: list[int], tokens_max: int = 40) -> Sequence:
    cache = make_prompt_cache(model)
    with mx.stream(generation_stream):
        model(mx.array(ids[:-1])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
    return Sequence(key, cache, ids[:-1], ids[-1:], GREEDY, tokens_max)


def prompts(count: int) -> dict[str, list[int]]:
    chance = random.Random(5)
    return {
        f"r{n}": [chance.randrange(20, 3000) for _ in range(chance.choice([9, 30, 200]))]
        for n in range(count)
    }


def alone(model: Any, ids: list[int], tokens: int) -> list[int]:
    decoder = Decoder(model, generation_stream, is_mergeable=True)
    decoder.add(sequence(model, "x", ids))
    return [decoder.step()[0].token_id for _ in range(tokens)]


@pytest.mark.parametrize("is_mergeable", [True, False], ids=["batched", "taking turns"])
def test_joining_and_leaving_mid_flight_leaves_every_token_as_it_is_alone(
    model: Any, is_mergeable: bool
) -> None:
    wanted = {"r0": 25, "r1": 9, "r2": 18, "r3": 1, "r4": 12}
    expected = {key: alone(model, ids, wanted[key]) for key, ids in prompts(5).items()}
    decoder = Decoder(model, generation_stream, is_mergeable)
    arriving = list(prompts(5).items())
    got: dict[str, list[int]] = {key: [] for key in wanted}
    for turn in range(80):
        if turn % 3 == 0 and arriving:
            key, ids = arriving.pop(0)
            decoder.add(sequence(model, key, ids, wanted[key]))
        for sampled in decoder.step():
            got[sampled.key].append(sampled.token_id)
            if len(got[sampled.key]) == wanted[sampled.key]:
                decoder.remove(sampled.key)
    assert got == expected
    assert len(decoder) == 0


def test_removing_at_any_moment_leaves_the_others_alone(model: Any) -> None:
    ids = prompts(3)
    expected = alone(model, ids["r0"], 15)
    for moment in range(6):
        decoder = Decoder(model, generation_stream, is_mergeable=True)
        for key in ids:
            decoder.add(sequence(model, key, ids["r0"] if key == "r0" else ids[key][:9] * 3))
        got = []
        for turn in range(30):
            if turn == moment:
                decoder.remove("r1")
                decoder.remove("r2")
            got += [s.token_id for s in decoder.step() if s.key == "r0"]
        assert got[:15] == expected


def test_a_long_row_and_a_short_one_share_no_batch_where_padding_costs_more_than_weights() -> None:
    model = load(str(fixture_dir("qwen3", tiny=True)))[0]
    decoder = Decoder(model, generation_stream, is_mergeable=True)
    decoder.cost = ReadCost(weight_bytes=700, row_bytes=1)
    for key, length in {"long": 600, "short": 9, "longer": 900, "shorter": 12}.items():
        decoder.add(sequence(model, key, list(range(20, 20 + length))))
    decoder.step()
    assert sorted(map(sorted, decoder.batch_keys)) == [["long", "longer"], ["short", "shorter"]]


def test_where_padding_to_the_longest_has_no_room_the_others_share_a_batch() -> None:
    model = load(str(fixture_dir("qwen3", tiny=True)))[0]
    decoder = Decoder(model, generation_stream, is_mergeable=True)
    decoder.cost = ReadCost(weight_bytes=1e9, row_bytes=1)
    asked: list[int] = []

    def has_room(nbytes: int) -> bool:
        asked.append(nbytes)
        return nbytes <= 100

    decoder.has_room = has_room
    for key, length in {"a": 9, "long": 900, "b": 12, "c": 10}.items():
        decoder.add(sequence(model, key, list(range(20, 20 + length))))
    decoder.step()
    assert decoder.batch_keys == [{"a", "b", "c"}] and len(decoder) == 4
    assert max(asked) >= 2 * 888, "it was asked for all of them first"


def test_a_batch_that_others_find_no_room_in_stays_as_it_is() -> None:
    model = load(str(fixture_dir("qwen3", tiny=True)))[0]
    decoder = Decoder(model, generation_stream, is_mergeable=True)
    decoder.cost = ReadCost(weight_bytes=1e9, row_bytes=1)
    for key in ("a", "b"):
        decoder.add(sequence(model, key, list(range(20, 40))))
    decoder.step()
    decoder.has_room = lambda _nbytes: False
    decoder.add(sequence(model, "long", list(range(20, 420))))
    for _ in range(3):
        decoder.step()
    assert decoder.batch_keys == [{"a", "b"}] and len(decoder) == 3


def test_what_joining_copies_is_asked_for_too() -> None:
    model = load(str(fixture_dir("qwen3", tiny=True)))[0]
    decoder = Decoder(model, generation_stream, is_mergeable=True)
    decoder.cost = ReadCost(weight_bytes=1e9, row_bytes=1)
    decoder.has_room = lambda nbytes: nbytes <= 100
    for key, nbytes in (("a", 30), ("b", 70), ("c", 20)):
        made = sequence(model, key, list(range(20, 40)))
        made.join_bytes = lambda nbytes=nbytes: nbytes
        decoder.add(made)
    decoder.step()
    assert decoder.batch_keys == [{"a", "c"}], "all three copy 120 bytes"
    decoder.has_room = lambda nbytes: nbytes <= 10
    decoder.add(sequence(model, "d", list(range(20, 40))))
    decoder.step()
    assert "d" in decoder.batch_keys[0], "who is in a batch has copied"


def test_removing_what_is_not_there_does_nothing(model: Any) -> None:
    decoder = Decoder(model, generation_stream, is_mergeable=True)
    decoder.remove("nobody")
    assert decoder.step() == []

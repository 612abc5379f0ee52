"""Prompts with images through encoder and engine: whatever is cut, kept or checked, as if cold."""

import logging
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, strategies as st

from hearth.shared.errors import RequestError
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.vision.image_encoding_and_positions import (
    ImageEncoder,
    UnknownImageInputs,
    checked_vision,
)
from hearth.worker.engine.vision.vlm_language_model import VLMLanguageModel
from scripts.fixtures.fixture_cache import VISION_NAMES
from scripts.harness.socketless_worker import loaded
from scripts.harness.vision_worker import prompt
from tests.helpers.by_day import by_day
from tests.helpers.models.vision_engine import (
    answer,
    cuts_of,
    feed,
    forget_positions,
    held,
    new_engine,
    new_vision,
    picture,
    remembers_positions,
    restored,
    same,
    text,
)

MROPE = by_day((name for name in VISION_NAMES if name != "gemma3"), ("qwen3_vl", "qwen3_5_vl"))
CHECKED = by_day(VISION_NAMES, ("qwen3_vl", "gemma3"))
SIZES = [(60, 60), (200, 60), (60, 140), (90, 120)]  # pixels


@given(data=st.data())
@pytest.mark.parametrize("name", MROPE)
def test_every_stretch_has_the_positions_that_the_whole_prompt_has(name: str, data: Any) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(SIZES)), max_size=4))
    parts = [p for count, size in sizes for p in (text(1, count), picture(name, 1, *size))]
    ids, runs = prompt(*parts, text(2, data.draw(st.integers(1, 20))))
    at = data.draw(st.integers(0, len(ids) - 1))
    end = data.draw(st.integers(at + 1, len(ids)))
    language = loaded(name).model.model
    grids = [row for run in runs for row in run.image.grid]
    expected, delta = language.get_rope_index(
        mx.array([ids]), image_grid_thw=mx.array(grids) if grids else None
    )
    whole = np.broadcast_to(np.array(expected), (3, 1, len(ids)))
    vision = new_vision(name)
    told = vision.model_arguments(ids[at:end], at, runs)
    if "shift" in told:
        positions = np.broadcast_to(np.arange(at, end) + told["shift"], (3, 1, end - at))
    else:
        positions = np.array(told["position_ids"])
    assert np.array_equal(positions, whole[:, :, at:end])
    assert vision.shift(runs, len(ids)) == int(np.array(delta).item() if runs else 0)


def test_what_was_encoded_for_one_owner_is_not_there_for_another() -> None:
    vision, one = new_vision("qwen3_vl"), picture("qwen3_vl", 1)
    mine, another = replace(one, owner="mine"), replace(one, owner="another")
    vision.encode(mine)
    assert (vision.is_encoded(mine), vision.is_encoded(another)) == (True, False)
    assert not vision.is_encoded(one)
    vision.encode(another)
    vision.encode(mine)
    assert vision.encoder_calls == 2


def test_the_size_of_a_picture_that_another_key_has_shown_is_not_remembered_for_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vision, one = new_vision("qwen3_vl"), picture("qwen3_vl", 1)
    model, counted = loaded("qwen3_vl").model.model, list[int]()
    positions_of = model.get_rope_index

    def counting(ids: Any, **more: Any) -> Any:
        counted.append(ids.shape[1])
        return positions_of(ids, **more)

    monkeypatch.setattr(model, "get_rope_index", counting)
    shifts = []
    for owner in ("mine", "mine", "theirs", "mine"):
        ids, runs = prompt(text(1, 3), replace(one, owner=owner), text(1, 3))
        shifts.append(vision.shift(runs, len(ids)))
    assert len(counted) == 2, "B pays what A paid, and A pays once"
    assert set(shifts) == {-8}


@pytest.mark.parametrize("name", CHECKED)
def test_a_picture_is_encoded_once_for_as_long_as_it_is_kept(name: str) -> None:
    vision, one, two = new_vision(name), picture(name, 1), picture(name, 2)
    assert not vision.is_encoded(one) and vision.nbytes == 0
    vision.encode(one)
    vision.encode(one)
    ids, runs = prompt(text(1, 3), one, text(2, 3), one)
    vision.model_arguments(ids, 0, runs)
    assert vision.encoder_calls == 1 and vision.is_encoded(one) and vision.encoder_seconds > 0
    alone = vision.nbytes
    vision.encode(two)
    assert vision.encoder_calls == 2 and vision.nbytes == 2 * alone


def test_what_was_used_longest_ago_makes_room_and_the_newest_always_stays() -> None:
    name = "qwen3_vl"
    one, two, three = (picture(name, seed) for seed in (1, 2, 3))
    vision = new_vision(name)
    vision.encode(one)
    room = 2 * vision.nbytes
    vision = new_vision(name, bytes_max=room)
    for each in (one, two, one, three):
        vision.encode(each)
    assert [vision.is_encoded(each) for each in (one, two, three)] == [True, False, True]
    assert vision.nbytes == room and vision.encoder_calls == 3
    small = new_vision(name, bytes_max=1)
    for each in (one, two):
        small.encode(each)
        assert small.is_encoded(each)
    assert not small.is_encoded(one) and small.nbytes == room // 2


def test_a_stretch_of_more_pictures_than_may_be_kept_has_them_all() -> None:
    name = "qwen2_5_vl"
    ids, runs = prompt(picture(name, 1), picture(name, 2), text(1, 4))
    told = [new_vision(name, room).model_arguments(ids, 0, runs) for room in (1, 1 << 30)]
    assert mx.array_equal(told[0]["inputs_embeds"], told[1]["inputs_embeds"])


def warnings(caplog: Any) -> list[str]:
    """Return what the worker has warned of; libraries warn where they are first used."""
    return [row.getMessage() for row in caplog.records if row.name.startswith("hearth.worker")]


@pytest.mark.parametrize("name", CHECKED)
def test_a_picture_that_passes_the_check_is_offered(name: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "hearth.worker"):
        vision = checked_vision(loaded(name), picture(name, 1, 60, 60), 1000)
    assert vision is not None and vision.splits_images and vision.encoder_calls == 0
    assert not warnings(caplog)


def refusal(name: str, caplog: Any) -> str:
    with caplog.at_level(logging.WARNING, "hearth.worker"):
        assert checked_vision(loaded(name), picture(name, 1), 1000) is None
    (warning,) = warnings(caplog)
    return warning


@pytest.mark.parametrize("name", MROPE)
def test_positions_that_are_a_little_off_are_found_out(
    name: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the text behind an image began one later."""
    right = ImageEncoder.shift
    monkeypatch.setattr(ImageEncoder, "shift", lambda *given: right(*given) + bool(right(*given)))
    assert "images are refused" in refusal(name, caplog)


@pytest.mark.parametrize("name", CHECKED)
def test_an_image_that_is_not_seen_is_found_out(
    name: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ImageEncoder.model_arguments

    def blind(self: ImageEncoder, *given: Any) -> dict[str, Any]:
        told = whole(self, *given)
        return {
            name: value * 0 if name == "inputs_embeds" else value for name, value in told.items()
        }

    monkeypatch.setattr(ImageEncoder, "model_arguments", blind)
    assert "images are refused" in refusal(name, caplog)


def test_a_model_that_reads_an_image_only_whole_is_given_it_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "qwen3_vl"
    right = ImageEncoder.model_arguments

    def split_wrongly(self: ImageEncoder, ids: Any, at: int, runs: Any) -> dict[str, Any]:
        told = right(self, ids, at, runs)
        amid = any(run.start < at < run.end for run in runs)
        return told | {"inputs_embeds": told["inputs_embeds"] * 0} if amid else told

    monkeypatch.setattr(ImageEncoder, "model_arguments", split_wrongly)
    vision = checked_vision(loaded(name), picture(name, 1), 1000)
    assert vision is not None and not vision.splits_images


def test_what_is_not_a_row_for_each_token_refuses_images(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "qwen2_5_vl"
    parts = loaded(name).vision
    assert parts is not None
    right = parts.model.get_input_embeddings

    def crossing(self: Any, *given: Any, **told: Any) -> Any:
        made = right(*given, **told)
        made.cross_attention_states = made.inputs_embeds
        return made

    monkeypatch.setattr(type(parts.model), "get_input_embeddings", crossing)
    with pytest.raises(UnknownImageInputs, match="cross_attention_states"):
        new_vision(name).encode(picture(name, 1))
    assert "cross_attention_states" in refusal(name, caplog)


def test_a_model_that_lays_positions_out_otherwise_counts_them_itself() -> None:
    class Ernie:
        def get_rope_index(self, ids: mx.array, *_: Any) -> tuple[mx.array, None]:
            return mx.zeros((1, ids.shape[1], 3)), None

    assert not VLMLanguageModel(Ernie(), list).takes_positions


NAMES = by_day(VISION_NAMES, ("qwen3_5_vl", "gemma3"))  # states, and windows
CHUNK = 16


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(name: str) -> Engine:
    return new_engine(name)


def test_wherever_an_image_is_split_and_forgotten_it_goes_on_as_cold(name: str) -> None:
    engine, other = new_engine(name), picture(name, 5)
    ids, runs = prompt(text(1, 9), picture(name, 1), text(2, 12))
    forgetful = new_engine(name, bytes_max=0)
    assert forgetful.vision is not None
    for split in range(runs[0].start + 1, runs[0].end):
        cuts = [0, split, len(ids) - 1]
        cold = feed(engine, engine.new_cache(), ids, cuts, runs)
        warm = feed(forgetful, forgetful.new_cache(), ids, cuts[:2], runs)
        warm = restored(forgetful, warm, split)
        forgetful.vision.encode(other)
        feed(forgetful, warm, ids, cuts[1:], runs)
        assert same(held(warm), held(cold)), split
    assert engine.vision is not None and engine.vision.encoder_calls == 1


def test_nothing_of_a_request_stays_on_the_model(name: str, engine: Engine) -> None:
    vision = loaded(name).vision
    assert vision is not None
    forget_positions(vision.language)
    ids, runs = prompt(text(1, 20), picture(name, 1), text(2, 30))
    cache = feed(engine, engine.new_cache(), ids, cuts_of(len(ids), CHUNK), runs)
    answer(engine, cache, ids, runs)
    assert not remembers_positions(vision.language)


def test_an_image_that_the_encoder_does_not_take_ends_its_request_alone() -> None:
    name = "qwen3_vl"
    good = picture(name, 1)
    odd = {key: array[:-4] for key, array in good.inputs().items() if key == "pixel_values"}
    bad = replace(good, identity=b"too few patches!", inputs=lambda: {**good.inputs(), **odd})
    engine = new_engine(name)
    with pytest.raises(RequestError, match="cannot encode the image of 14 tokens") as refused:
        engine.encode(bad)
    assert (refused.value.status, refused.value.code) == (400, "image_refused")
    assert engine.encode(good) and not engine.encode(good)

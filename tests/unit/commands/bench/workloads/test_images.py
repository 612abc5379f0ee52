"""The image workload shows one image, talks on, and shows another."""

import asyncio
import base64
import io

import pytest
from PIL import Image

from hearth.commands.bench.workloads.server_lives import images
from tests.helpers.bench.played_visits import Played, made_visit


def test_the_first_image_stays_in_the_history_and_a_second_one_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Played().put_in(monkeypatch, images)
    found = asyncio.run(images.run(made_visit()))
    (rows,) = played.measured
    shown = [_images(row.body["messages"]) for row in rows]
    assert [len(each) for each in shown] == [1, 1, 1, 2]
    assert len(set(shown[3])) == 2 and {each[0] for each in shown} == {shown[3][0]}
    assert found.values["requests"] == 4


def _images(messages: list[dict[str, object]]) -> list[str]:
    parts = [
        part for each in messages if isinstance(each["content"], list) for part in each["content"]
    ]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def test_an_image_is_a_png_of_the_told_size_and_always_the_same() -> None:
    url = images.image_part(1)["image_url"]["url"]
    head, _, data = url.partition(",")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert head == "data:image/png;base64" and image.size == images.IMAGE_SIZE
    assert images.picture(1) == images.picture(1) != images.picture(2)
    assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10


def test_only_vision_models_are_shown_images() -> None:
    assert [each.needs_images for each in images.WORKLOADS] == [True]

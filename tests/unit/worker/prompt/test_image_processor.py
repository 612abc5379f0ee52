"""Pictures: what a model's own processor makes of an image, and what is remembered of it."""

import contextlib
import json
import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx_vlm
import numpy as np
import pytest
from PIL import Image

from hearth.shared.errors import RequestError, StartError
from hearth.shared.paths import PROJECT_DIR
from hearth.worker.prompt.images import image_processor
from hearth.worker.prompt.images.image_processor import ImageReader, image_marker
from scripts.fixtures.fixture_cache import VISION_NAMES, mlx_environment
from scripts.harness.image_files import noise, saved
from tests.helpers.models.vision_processors import processor_of, reader_of

QWEN_NAMES = [name for name in VISION_NAMES if name != "gemma3"]
every_model = pytest.mark.parametrize("name", VISION_NAMES)


@every_model
def test_a_picture_is_what_the_models_own_processor_makes_of_it(name: str) -> None:
    processor, _ = processor_of(name)
    reader = reader_of(name)
    image = noise(120, 80)
    picture = reader.read("a", saved(image, "PNG"))
    marker = image_marker(processor.tokenizer, processor)
    expected = mlx_vlm.prepare_inputs(processor, images=[image], prompts=marker)
    ids = np.array(expected["input_ids"]).ravel().tolist()
    around = [processor.tokenizer.encode(text) for text in (reader.before, reader.after)]
    assert [*around[0], *picture.ids, *around[1]] == ids
    inputs = picture.inputs()
    assert set(inputs) == set(expected) - {"input_ids", "attention_mask"}
    for key, array in inputs.items():
        assert type(array) is np.ndarray and array.flags.owndata, "nothing of MLX's leaves"
        assert np.array_equal(array, np.array(expected[key])), key
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@every_model
def test_a_pictures_grid_is_its_patches_where_the_model_tells_one(name: str) -> None:
    picture = reader_of(name).read("a", saved(noise(448, 224), "PNG"))
    rows, ids = picture.inputs()["pixel_values"].shape[0], len(picture.ids)
    expected = () if name == "gemma3" else ((1, (side := math.isqrt(rows // 2)), 2 * side),)
    assert picture.grid == expected
    assert not expected or ids - 2 == rows // 4


@every_model
def test_identity_is_of_what_the_model_sees_and_not_of_the_file(name: str) -> None:
    image = noise(112, 112, seed=3)
    other = image.copy()
    other.putpixel((50, 60), tuple(255 - value for value in image.getpixel((50, 60))))
    reader = reader_of(name)
    first = reader.read("png", saved(image, "PNG")).identity
    assert reader.read("webp", saved(image, "WEBP", lossless=True)).identity == first
    assert reader.read("other", saved(other, "PNG")).identity != first
    assert reader.read("turned", saved(image.rotate(180), "PNG")).identity != first
    assert reader_of(name).read("again", saved(image, "PNG")).identity == first


# ------------------------------------------------------------ what is remembered


def test_nothing_is_known_of_images_once_they_are_forgotten() -> None:
    reader = reader_of("qwen3_vl")
    data = saved(noise(120, 80), "PNG")
    first = reader.read("a", data)
    reader.forget()
    assert reader.read("a", data).identity == first.identity
    assert reader.counts == {"decoded": 2}
    reader.forget()
    assert first.inputs() and reader.counts == {"decoded": 2, "again": 1}, "a request goes on"


def test_what_one_owner_has_shown_makes_no_image_of_another_faster() -> None:
    reader = reader_of("qwen3_vl")
    data = saved(noise(120, 80), "PNG")
    pictures_read = [reader.read("a", data, owner) for owner in ("", "mine", "other", "mine")]
    assert reader.counts == {"decoded": 3, "known": 1}
    assert [picture.owner for picture in pictures_read] == ["", "mine", "other", "mine"]
    assert len({picture.identity for picture in pictures_read}) == 1


def test_two_threads_at_once_decode_one_image_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_processor, "ARRAYS_BYTES_MAX", 1)
    reader = reader_of("gemma3")
    read = [reader.read(str(n), saved(noise(99, 99, seed=n), "PNG")) for n in range(4)]
    expected = [picture.inputs()["pixel_values"] for picture in read]
    real, both, met = image_processor.decoded, threading.Barrier(2), list[int]()

    def meeting(data: bytes, pixels_max: int) -> Image.Image:
        with contextlib.suppress(threading.BrokenBarrierError):  # once nobody came it is broken
            met.append(both.wait(1.0))
        return real(data, pixels_max)

    def right(at: int) -> bool:
        return np.array_equal(read[at].inputs()["pixel_values"], expected[at])

    monkeypatch.setattr(image_processor, "decoded", meeting)
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(right, [0, 1, 2, 3] * 5))
    assert met == []


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", QWEN_NAMES)
def test_a_shape_that_the_processor_does_not_take_is_refused_with_its_reason(name: str) -> None:
    reader = reader_of(name)
    with pytest.raises(RequestError) as caught:
        reader.read("a", saved(Image.new("RGB", (402, 2)), "PNG"))
    assert (caught.value.status, caught.value.code) == (400, "image_refused")
    assert str(caught.value) == (
        "The image is 402 x 2 pixels, and the model's processor does not take it: absolute aspect "
        "ratio must be smaller than 200, got 201.0. Crop it, or add a margin."
    )
    assert reader.counts == {"image_refused": 1}
    assert reader.read("b", saved(Image.new("RGB", (400, 2)), "PNG")).ids


@every_model
def test_a_single_pixel_is_an_image(name: str) -> None:
    assert len(reader_of(name).read("a", saved(noise(1, 1), "PNG")).ids) > 2


def test_refusals_are_counted_and_not_remembered() -> None:
    reader = reader_of("qwen3_vl", pixels_max=100)
    for code, data in (
        ("image_too_many_pixels", saved(noise(11, 10), "PNG")),
        ("image_type", b"hello"),
        ("image_broken", saved(noise(9, 9), "PNG")[:60]),
    ):
        for _ in range(2):
            with pytest.raises(RequestError) as caught:
                reader.read("a", data)
            assert caught.value.code == code
        assert reader.counts[code] == 2
    for _ in range(2):
        assert reader.read("a", saved(noise(10, 10), "PNG")).ids
    assert reader.outcomes() == {"decoded": 1, "again": 0, "known": 1, "refused": 6}


def test_an_image_that_the_processor_would_cut_into_several_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cutting = processor_of("gemma3")[0].image_processor
    reader = reader_of("gemma3")
    monkeypatch.setattr(cutting, "do_pan_and_scan", True)
    monkeypatch.setattr(cutting, "pan_and_scan_min_crop_size", 16)
    monkeypatch.setattr(cutting, "pan_and_scan_max_num_crops", 4)
    monkeypatch.setattr(cutting, "pan_and_scan_min_ratio_to_activate", 1.2)
    with pytest.raises(RequestError, match="it would be cut into several"):
        reader.read("a", saved(noise(400, 100), "PNG"))
    assert reader.read("b", saved(noise(100, 100), "PNG")).ids


def test_a_processor_that_reads_no_image_is_told_at_the_start() -> None:
    processor, config = processor_of("qwen3_vl")
    with pytest.raises(StartError, match="cannot read images"):
        ImageReader(processor, config, "no marker")


# ------------------------------------------------------------ the marker


def templated(template: str) -> Any:
    """Return a tokenizer with a chat template of its own."""
    from jinja2 import Environment

    compiled = Environment().from_string(template)
    return SimpleNamespace(
        apply_chat_template=lambda messages, tokenize: compiled.render(messages=messages)
    )


LOOP = "{% for c in messages[0].content %}{% if c.type == 'image' %}IMAGE{% else %}{{ c.text }}"
LOOP += "{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "marker"),
    [
        (f"<user>{LOOP.replace('IMAGE', '<img>')}</user>", "<img>"),
        (f"<user>{LOOP.replace('IMAGE', '<image>' + chr(10))}</user>", "<image>\n"),
        (f"<user>{LOOP.replace('IMAGE', '<img_{{ loop.index }}>')}</user>", None),
        ("<user>{{ messages[0].content[-1].text }}</user>", "<soft>"),
        ("{{ messages[0].content + 1 }}", "<soft>"),
    ],
    ids=["plain", "with a newline", "numbered", "shows no images", "raises"],
)
def test_the_marker_of_any_template(template: str, marker: str | None) -> None:
    processor = SimpleNamespace(image_token="<soft>")
    assert image_marker(templated(template), processor) == marker


def test_where_the_template_shows_none_it_is_the_processors_token_or_nothing() -> None:
    bare = templated("{{ messages[0].content[-1].text }}")
    both = SimpleNamespace(boi_token="<start>", image_token="<soft>")
    assert image_marker(bare, both) == "<start>", "what Gemma's processor puts an image in place of"
    assert image_marker(bare, SimpleNamespace()) is None


class _WithEnds:
    """A processor whose tokenizer puts its own tokens around every text."""

    image_token = "<img>"
    bos_token_id, eos_token_id, pad_token = 1, 2, "x"

    def __init__(self) -> None:
        self.added_tokens_decoder = {1: "<s>", 2: "</s>", 7: "<img>"}
        self.tokenizer = self

    def __call__(self, text: str, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        ids = [[1, *[40, 7, 7, 7, 41] * len(images), 2]]
        return {
            "input_ids": np.array(ids),
            "attention_mask": np.ones_like(ids),
            "pixel_values": [np.zeros((3, 4, 4))],
            "image_sizes": [[4, 4]],
        }

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(token) for token in ids)


def test_tokens_that_a_tokenizer_puts_around_every_text_are_no_images() -> None:
    reader = ImageReader(_WithEnds(), {}, "<img>")
    assert (reader.before, reader.after) == ("(", ")")
    picture = reader.read("a", saved(noise(4, 4), "PNG"))
    assert picture.ids == (7, 7, 7)
    assert picture.inputs()["image_sizes"].tolist() == [[4, 4]]
    assert picture.inputs()["pixel_values"].shape == (1, 3, 4, 4)


class _Telling(_WithEnds):
    """One that tells of each token, and adds texts, as DeepSeek's and Gemma 4's do."""

    def __call__(self, text: str, images: list[Image.Image], **more: Any) -> dict[str, Any]:
        made = super().__call__(text, images, **more)
        types = (made["input_ids"] == 7).astype(np.int32)
        return {**made, "mm_token_type_ids": types, "labels": types, "sft_format": ["chat"]}


def test_what_is_told_of_each_token_is_kept_for_those_of_the_image() -> None:
    data = saved(noise(4, 4), "PNG")
    picture = ImageReader(_Telling(), {}, "<img>").read("a", data)
    inputs = picture.inputs()
    assert inputs["mm_token_type_ids"].tolist() == [[1, 1, 1]]
    assert set(inputs) == {"pixel_values", "image_sizes", "mm_token_type_ids"}, "no texts"
    plain = ImageReader(_WithEnds(), {}, "<img>").read("a", data)
    assert picture.identity == plain.identity, "it follows from the tokens"


class _Numbering(_WithEnds):
    """One that writes the number of each image before it."""

    def __call__(self, text: str, images: list[Image.Image], **more: Any) -> dict[str, Any]:
        made = super().__call__(text, images, **more)
        runs = [token for number in range(len(images)) for token in (7, 50 + number, 7)]
        return {**made, "input_ids": np.array([[1, *runs, 2]])}


def test_a_processor_that_numbers_its_images_is_told_at_the_start() -> None:
    with pytest.raises(StartError, match="two images otherwise than each by itself"):
        ImageReader(_Numbering(), {}, "<img>")


# ------------------------------------------------------------ large ones

LARGE = """
import json, resource, sys
from tests.helpers.models.vision_processors import reader_of
reader = reader_of(sys.argv[1], pixels_max=40_000_000)
data = open(sys.argv[2], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
picture = reader.read("large", data)
unit = 1 if sys.platform == "darwin" else 1024
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
print(json.dumps([grown, len(picture.ids) - 2, picture.inputs()["pixel_values"].shape[0]]))
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("qwen3_vl", "gemma3") else pytest.mark.night)
        for name in VISION_NAMES
    ],
)
def test_a_large_screenshot_is_resized_as_the_processor_says_in_bounded_memory(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "large.png"
    square = noise(400, 400)
    path.write_bytes(saved(square.resize((4_000, 4_000), Image.Resampling.NEAREST), "PNG"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LARGE, name, str(path)],
        cwd=PROJECT_DIR,
        env=mlx_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    grown, tokens, rows = json.loads(done.stdout.splitlines()[-1])
    assert grown < 24 * 4_000 * 4_000, "bytes a pixel: 16, and what allocators keep"
    assert (tokens, rows) == ((16, 1) if name == "gemma3" else (256, 4 * 256))

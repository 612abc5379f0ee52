"""Checks that remembered images equal what a fresh reader makes, in any order of reading."""

from collections import Counter, OrderedDict
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from hearth.worker.prompt.images import image_processor
from hearth.worker.prompt.images.image_processor import ImageReader
from scripts.harness.image_files import noise, saved

SIZES = [(4, 4), (8, 4), (8, 8), (16, 8), (16, 16), (4, 16)]
FILES = {str(at): saved(noise(*size, seed=at), "PNG") for at, size in enumerate(SIZES)}
BYTES = {str(at): 3 * width * height for at, (width, height) in enumerate(SIZES)}

# As hearth.worker.prompt.images.image_processor does itself, where nobody has set other filters.
pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")


class Processor:
    """Gives the pixels as they are, and a token for each row."""

    bos_token_id = eos_token_id = None
    pad_token = "x"

    def __init__(self) -> None:
        self.added_tokens_decoder = {7: "<img>"}
        self.tokenizer = self

    def __call__(self, text: str, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        ids = [[7] * sum(image.height for image in images)]
        return {"input_ids": np.array(ids), "pixel_values": np.asarray(images[0])}


class Expected:
    """What two plain least-recently-used lists would remember."""

    def __init__(self, bytes_max: int, facts_max: int) -> None:
        self.bytes_max, self.facts_max = bytes_max, facts_max
        self.facts: OrderedDict[str, None] = OrderedDict()
        self.arrays: OrderedDict[str, None] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def read(self, digest: str) -> None:
        if digest in self.facts:
            self.facts.move_to_end(digest)
            self.counts["known"] += 1
        else:
            self.counts["decoded"] += 1
            self.facts[digest] = None
            while len(self.facts) > self.facts_max:
                self.facts.popitem(last=False)
            self._made(digest)

    def inputs(self, digest: str) -> None:
        if digest in self.arrays:
            self.arrays.move_to_end(digest)
        else:
            self.counts["again"] += 1
            self._made(digest)

    def _made(self, digest: str) -> None:
        self.arrays[digest] = None
        self.arrays.move_to_end(digest)
        while len(self.arrays) > 1 and sum(BYTES[d] for d in self.arrays) > self.bytes_max:
            self.arrays.popitem(last=False)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(FILES)), st.booleans()), min_size=15, max_size=40
    ),
    bytes_max=st.integers(1, sum(BYTES.values())),
    facts_max=st.integers(1, len(FILES)),
)
def test_any_order_of_reading_gives_what_a_fresh_reader_gives(
    steps: list[tuple[str, bool]], bytes_max: int, facts_max: int
) -> None:
    expected = Expected(bytes_max, facts_max)
    with (
        mock.patch.object(image_processor, "ARRAYS_BYTES_MAX", bytes_max),
        mock.patch.object(image_processor, "FACTS_MAX", facts_max),
    ):
        reader = ImageReader(Processor(), {}, "<img>", 1_000)
        for digest, encodes in steps:
            picture = reader.read(digest, FILES[digest])
            expected.read(digest)
            fresh = ImageReader(Processor(), {}, "<img>", 1_000).read(digest, FILES[digest])
            assert (picture.identity, picture.ids) == (fresh.identity, fresh.ids)
            assert len(picture.ids) == SIZES[int(digest)][1]
            if encodes:
                mine, theirs = picture.inputs(), fresh.inputs()
                expected.inputs(digest)
                assert np.array_equal(mine["pixel_values"], theirs["pixel_values"])
            assert +reader.counts == +expected.counts


@given(
    at=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    channel=st.integers(0, 2),
    change=st.integers(1, 255),
)
def test_one_changed_value_of_one_pixel_is_another_image(
    at: tuple[int, int], channel: int, change: int
) -> None:
    reader = ImageReader(Processor(), {}, "<img>", 1_000)
    pixels = np.array(noise(8, 8))
    first = reader.read("first", saved(Image.fromarray(pixels), "PNG")).identity
    pixels[at][channel] = (int(pixels[at][channel]) + change) % 256
    other = reader.read("other", saved(Image.fromarray(pixels), "PNG"))
    assert other.identity != first
    assert reader.read("webp", saved(Image.fromarray(pixels), "WEBP", lossless=True)).identity == (
        other.identity
    )

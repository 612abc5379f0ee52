"""Whatever the bytes: a picture as Pillow shows it, or an error of the request."""

import io

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from hearth.shared.errors import RequestError
from hearth.worker.prompt.images.image_processor import decoded
from scripts.harness.image_files import gif, noise, png, samples, saved, webp_that_claims

PIXELS_MAX = 1_000_000
CODES = {"image_type", "image_too_many_pixels", "image_broken"}
SAMPLES = samples()

# As hearth.worker.prompt.images.image_processor does itself, where nobody has set other filters.
pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")

sizes = st.tuples(st.integers(1, 40), st.integers(1, 40))


def outcome(data: bytes) -> str:
    """Return "RGB", or the code of the refusal; anything else that is raised fails the test."""
    try:
        image = decoded(data, PIXELS_MAX)
    except RequestError as error:
        assert error.status == 400 and error.code in CODES
        return error.code
    assert image.mode == "RGB" and image.width * image.height <= PIXELS_MAX
    return image.mode


@given(
    size=sizes,
    mode=st.sampled_from(["1", "L", "P", "RGB", "CMYK"]),
    kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]),
    seed=st.integers(0, 1_000),
)
def test_an_opaque_image_of_any_mode_has_the_pixels_that_pillow_shows(
    size: tuple[int, int], mode: str, kind: str, seed: int
) -> None:
    image = noise(*size, seed=seed).convert(mode)
    if (mode, kind) in {("P", "JPEG"), ("CMYK", "PNG"), ("CMYK", "WEBP"), ("CMYK", "GIF")}:
        image = image.convert("RGB")
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = saved(image, kind, **lossless)
    with Image.open(io.BytesIO(data)) as shown:
        expected = np.asarray(shown.convert("RGB"))
    read = np.asarray(decoded(data, PIXELS_MAX))
    assert np.array_equal(read, expected)
    if kind in ("PNG", "WEBP"):
        assert np.array_equal(read, np.asarray(image.convert("RGB")))


@given(size=sizes, kind=st.sampled_from(["PNG", "WEBP"]), seed=st.integers(0, 1_000))
def test_transparency_is_laid_on_white(size: tuple[int, int], kind: str, seed: int) -> None:
    image = noise(*size, channels=4, seed=seed)
    stored = np.asarray(image).astype(float)
    alpha = stored[..., 3:] / 255
    expected = stored[..., :3] * alpha + 255 * (1 - alpha)
    lossless = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    read = np.asarray(decoded(saved(image, kind, **lossless), PIXELS_MAX))
    assert np.abs(read - expected).max() <= 1


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_file_cut_off_anywhere_is_a_picture_or_a_refusal(name: str) -> None:
    data = SAMPLES[name]
    outcomes = [outcome(data[:length]) for length in range(len(data) + 1)]
    assert outcomes[-1] == "RGB"
    assert outcomes[0] == "image_type" and "image_broken" in outcomes
    assert set(outcomes[: len(data) // 3]) <= {"image_type", "image_broken"}


@given(
    name=st.sampled_from(sorted(SAMPLES)),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=12),
)
def test_a_file_with_changed_bytes_is_a_picture_or_a_refusal(
    name: str, changes: list[tuple[float, int]]
) -> None:
    data = bytearray(SAMPLES[name])
    for where, value in changes:
        data[int(where * (len(data) - 1))] = value
    outcome(bytes(data))


@given(
    magic=st.sampled_from(
        [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8 "]
    ),
    rest=st.binary(max_size=200),
)
def test_random_bytes_are_refused(magic: bytes, rest: bytes) -> None:
    assert outcome(magic + rest) != "RGB"


@given(width=st.integers(1, 65_535), height=st.integers(1, 65_535))
def test_what_a_header_claims_is_held_to_the_limit(width: int, height: int) -> None:
    refused = {"image_too_many_pixels"} if width * height > PIXELS_MAX else {"image_broken", "RGB"}
    assert outcome(png(width, height, b"")) in refused
    assert outcome(gif(width, height, 1, 1)) in refused
    assert outcome(gif(1, 1, width, height, disposal=2)) in refused
    assert outcome(webp_that_claims(width, height)) in {*refused, "image_broken"}

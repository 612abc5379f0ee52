"""Image files become upright RGB pixels, or an error that says what is wrong with them."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hearth.shared.errors import RequestError
from hearth.shared.paths import PROJECT_DIR
from hearth.worker.prompt.images.image_processor import PIXELS_MAX, SEGMENTS_MAX, decoded
from scripts.harness.image_files import (
    chunk,
    gif,
    noise,
    png,
    samples,
    saved,
    turned,
    webp_that_claims,
)

BLACK_ROW = b"\0" + bytes(3)

# As hearth.worker.prompt.images.image_processor does itself, where nobody has set other filters.
pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")


def pixels(data: bytes) -> NDArray[np.uint8]:
    image = decoded(data, PIXELS_MAX)
    assert image.mode == "RGB"
    return np.asarray(image)


def refusal(data: bytes, pixels_max: int = PIXELS_MAX) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decoded(data, pixels_max)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("name", sorted(samples()))
def test_every_format_and_mode_is_read_as_an_rgb_image_of_its_size(name: str) -> None:
    shape = pixels(samples()[name]).shape
    assert shape == ((13, 9, 3) if name in ("png rgb", "jpeg rgb") else (9, 13, 3))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (saved(noise(4, 4), "BMP"), "BMP"),
        (saved(noise(4, 4), "TIFF"), "TIFF"),
        (saved(noise(4, 4), "AVIF"), "AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"hello, world", "of no known format (it begins with 68 65 6c 6c 6f 2c 20 77)"),
        (b"", "of no known format (it begins with nothing)"),
        (b"RIFF\x04\0\0\0WAVE", "of no known format (it begins with 52 49 46 46 04 00 00 00)"),
    ],
)
def test_another_format_is_refused_by_name(data: bytes, kind: str) -> None:
    error = refusal(data)
    assert error.code == "image_type"
    assert str(error).startswith(f"The image is {kind}; PNG, JPEG, WebP and GIF are read.")


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_orientation_says(kind: str, orientation: int) -> None:
    image = noise(5, 3)
    stored = np.asarray(image)
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(stored, 1),
    }[orientation]
    data = saved(
        image, kind, exif=turned(orientation), **({"lossless": True} if kind == "WEBP" else {})
    )
    assert np.array_equal(pixels(data), upright)


def test_an_orientation_that_is_none_leaves_the_image_as_it_is() -> None:
    image = noise(5, 3)
    assert np.array_equal(pixels(saved(image, "PNG", exif=turned(99))), np.asarray(image))


def test_metadata_that_cannot_be_read_cost_nothing() -> None:
    row = b"\0" + bytes([7, 8, 9])
    assert pixels(png(1, 1, row, chunk(b"eXIf", b"no TIFF at all"))).tolist() == [[[7, 8, 9]]]


def test_a_gif_shows_its_first_frame() -> None:
    frames = [Image.new("P", (4, 3), number) for number in (1, 2)]
    for frame in frames:
        frame.putpalette([0, 0, 0, 250, 10, 20, 30, 240, 50])
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (pixels(data) == [250, 10, 20]).all()


def test_what_is_transparent_is_white() -> None:
    clear, solid = [0, 0, 0, 0], [10, 20, 30, 255]
    rgba = Image.fromarray(np.array([[clear, solid]], dtype=np.uint8))
    expected = [[[255] * 3, [10, 20, 30]]]
    assert pixels(saved(rgba, "PNG")).tolist() == expected
    assert pixels(saved(rgba, "WEBP", lossless=True, exact=True)).tolist() == expected
    assert pixels(saved(rgba.convert("LA"), "PNG"))[0, 0].tolist() == [255] * 3
    palette = Image.new("P", (2, 1))
    palette.putdata([0, 1])
    palette.putpalette([0, 0, 0, 10, 20, 30])
    for kind in ("PNG", "GIF"):
        assert pixels(saved(palette, kind, transparency=0)).tolist() == expected
    half = saved(palette, "PNG", transparency=bytes([128, 255]))
    assert 126 <= pixels(half)[0, 0, 0] <= 128


def test_sixteen_bits_are_scaled_and_not_cut_off() -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=">u2")
    grey = png(5, 1, b"\0" + values.tobytes(), depth=16, color=0)
    assert pixels(grey)[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    clear = chunk(b"tRNS", b"\x80\0")
    grey = png(5, 1, b"\0" + values.tobytes(), clear, depth=16, color=0)
    assert pixels(grey)[0, :, 0].tolist() == [0, 0, 1, 255, 255]
    colours = np.array([65535, 32768, 256], dtype=">u2").tobytes()
    assert pixels(png(1, 1, b"\0" + colours, depth=16)).tolist() == [[[255, 128, 1]]]


def test_the_size_is_measured_before_anything_is_decoded() -> None:
    data = saved(noise(20, 10), "PNG")
    assert decoded(data, 200).size == (20, 10)
    error = refusal(data, pixels_max=199)
    assert error.code == "image_too_many_pixels"
    assert str(error) == (
        "The image has 20 x 10 = 200 pixels and this server accepts 199. Send a smaller one."
    )


@pytest.mark.parametrize(
    "data", [png(0, 5, b""), png(5, 0, b""), gif(0, 0, 0, 0)], ids=["no width", "no height", "gif"]
)
def test_an_image_without_pixels_is_broken(data: bytes) -> None:
    error = refusal(data)
    assert error.code == "image_broken"
    assert "it has no pixels" in str(error)


def test_a_file_that_was_cut_off_says_so() -> None:
    data = saved(noise(64, 64), "PNG")[:-4_000]
    error = refusal(data)
    assert error.code == "image_broken"
    assert f"a PNG file of {len(data):,} bytes, cannot be read: " in str(error)
    assert "truncated" in str(error) and "send it again" in str(error)


def test_a_jpeg_of_a_thousand_scans_is_not_decoded() -> None:
    data = saved(noise(16, 16), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    assert decoded(data[:-2] + 9 * last + data[-2:], PIXELS_MAX).size == (16, 16)
    error = refusal(data[:-2] + (SEGMENTS_MAX + 1) * last + data[-2:])
    assert error.code == "image_broken" and f"at most {SEGMENTS_MAX} are read" in str(error)


MEASURE = """
import json, pathlib, resource, sys
from hearth.shared.errors import RequestError
from hearth.worker.prompt.images.image_processor import decoded
codes = []
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        codes.append(decoded(pathlib.Path(path).read_bytes(), 40_000_000).mode)
    except RequestError as error:
        codes.append(error.code)
unit = 1 if sys.platform == "darwin" else 1024
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
print(json.dumps([codes, grown]))
"""


def in_a_process_of_its_own(tmp_path: Path, *files: bytes) -> tuple[list[str], int]:
    """Return each file's mode or code, and the bytes that memory grew by."""
    paths = []
    for number, data in enumerate(files):
        path = tmp_path / str(number)
        path.write_bytes(data)
        paths.append(str(path))
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", MEASURE, *paths],
        cwd=PROJECT_DIR,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "", "what Pillow warns of is not printed"
    codes, grown = json.loads(done.stdout)
    return codes, grown


@pytest.mark.process
def test_a_bomb_of_text_or_rows_does_not_fill_the_memory(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(300_000_000), 9)
    codes, grown = in_a_process_of_its_own(
        tmp_path,
        png(1, 1, BLACK_ROW, chunk(b"zTXt", b"key\0\0" + bomb)),
        png(1, 1, BLACK_ROW, chunk(b"iTXt", b"key\0\1\0\0\0" + bomb)),
        png(1, 1, BLACK_ROW, chunk(b"iCCP", b"key\0\0" + bomb)),
        png(1, 1, BLACK_ROW + bytes(300_000_000)),
        png(100_000, 100_000, b""),
        webp_that_claims(13_000, 13_000),
        png(1, 1, BLACK_ROW, chunk(b"acTL", bytes(8))),
        gif(1, 1, 9_600, 9_600),
    )
    assert codes[6:] == ["RGB", "image_too_many_pixels"]
    assert codes[:3] == ["image_broken"] * 3
    assert codes[3] == "RGB", "what stands behind the last row is never unpacked"
    assert codes[4:6] == ["image_too_many_pixels", "image_broken"]
    assert grown < 100_000_000

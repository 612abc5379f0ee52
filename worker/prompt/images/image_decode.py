"""Decodes image files into pixels; no other module does. A file is untrusted until it is decoded.

Pillow's reader of the one format that a file's first bytes show is called by name, so that no other
of its decoders ever runs. What a file claims is checked before any pixel is decoded.
"""

import io
import logging
import warnings
from collections.abc import Callable
from typing import Final

import numpy as np
from PIL import Image, ImageOps
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from hearth.shared.errors import RequestError

log = logging.getLogger(__name__)

# Pillow warns of metadata that it skips, for one: no news for those who run the server.
warnings.filterwarnings("ignore", module=r"PIL\.")

PIXELS_MAX: Final = 40_000_000
SEGMENTS_MAX: Final = 500  # what libjpeg's own fuzzers allow; a camera's file has some 10 of each

_READERS: Final[dict[str, Callable[[io.BytesIO], Image.Image]]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "GIF": GifImageFile,
    "WebP": WebPImageFile,
}
# First bytes -> format; those without a reader are there to be refused by name.
_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"<svg", "SVG"),
    (b"<?xml", "SVG"),
    (b"\xff\x0a", "JPEG XL"),
)
_BRANDS: Final = {b"avif": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC"}


def decoded(data: bytes, pixels_max: int) -> Image.Image:
    """Return the upright RGB image of a file: PNG, JPEG, WebP, or a GIF's first frame.

    Transparency is laid on white, as the pages and documents are that such images are made for:
    what is stored under it is often black, and black on black cannot be read. Of 16 bits a
    channel the upper 8 count. Beside the file it takes 4 to 16 bytes a pixel, the most for WebP.

    Raises:
        RequestError: 400; `image_type`, `image_too_many_pixels` or `image_broken`.
    """
    assert pixels_max > 0, pixels_max
    kind = _kind_of(data)
    _refuse_segments(kind, data)
    try:
        image = _READERS[kind](io.BytesIO(data))
    except Image.DecompressionBombError:  # no pixel was decoded; it does not tell the size
        over = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise _too_many(f"over {over:,} pixels", pixels_max) from None
    except Exception as error:  # whatever a parser meets in a damaged header
        raise _broken(
            kind, data, f"its header is damaged, or it has no pixels ({_error_text(error)})"
        ) from error
    width, height = image.size
    if width * height > pixels_max:
        raise _too_many(f"{width:,} x {height:,} = {width * height:,} pixels", pixels_max)
    try:
        image.load()
        _turn_upright(image)
        return _rgb(image)
    except Exception as error:  # whatever a decoder meets in damaged data
        raise _broken(kind, data, _error_text(error)) from error


def _kind_of(data: bytes) -> str:
    """Return the file's format by its first bytes. Raises RequestError for one that is not read."""
    kind = next((name for magic, name in _MAGIC if data.startswith(magic)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "WebP"
    elif data[4:8] == b"ftyp":
        kind = _BRANDS.get(data[8:12], "")
    if kind not in _READERS:
        named = kind or f"of no known format (it begins with {data[:8].hex(' ') or 'nothing'})"
        raise RequestError(
            f"The image is {named}; PNG, JPEG, WebP and GIF are read. Send it as one of these.",
            code="image_type",
        )
    return kind


def _refuse_segments(kind: str, data: bytes) -> None:
    """Raise where a JPEG would take minutes: each scan is a pass over all of the image.

    So is each piece of metadata over those before it. In compressed data these bytes cannot be.
    """
    for marker, name in ((b"\xff\xda", "scans"), (b"Exif\0\0", "pieces of metadata")):
        count = data.count(marker) if kind == "JPEG" else 0
        if count > SEGMENTS_MAX:
            raise _broken(kind, data, f"it has {count:,} {name}; at most {SEGMENTS_MAX} are read")


def _turn_upright(image: Image.Image) -> None:
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception as error:  # whatever a parser meets in damaged metadata: the pixels are whole
        log.info("an image is shown as it is stored, its metadata: %s", type(error).__name__)


def _rgb(image: Image.Image) -> Image.Image:
    """Return a decoded image of any mode as RGB."""
    if image.mode == "I;16":
        image = _eight_bits(image)
    if image.has_transparency_data:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(rgba, mask=rgba)
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits as one of 8; Pillow's own `convert` cuts off what is light."""
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    if isinstance(clear := image.info.get("transparency"), int):
        grey[values == clear] = 255
    return Image.fromarray(grey)


def _too_many(measured: str, pixels_max: int) -> RequestError:
    return RequestError(
        f"The image has {measured} and this server accepts {pixels_max:,}. Send a smaller one.",
        code="image_too_many_pixels",
    )


def _broken(kind: str, data: bytes, reason: str) -> RequestError:
    return RequestError(
        f"The image, a {kind} file of {len(data):,} bytes, cannot be read: {reason}. It may have "
        "been cut off or damaged on its way; save it anew and send it again.",
        code="image_broken",
    )


def _error_text(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

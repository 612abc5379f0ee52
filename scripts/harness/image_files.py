"""Makes image files for tests, with Pillow or, where Pillow refuses, byte by byte."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import ExifTags, Image


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> Image.Image:
    """Return an image of random bytes: grey, grey and alpha, RGB or RGBA."""
    shape = (height, width) if channels == 1 else (height, width, channels)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def painted(number: int, size: tuple[int, int]) -> Image.Image:
    """Return an image of `size` (width, height): smooth shapes of its own colours."""
    chance = np.random.default_rng(number)
    width, height = size
    waves = np.add.outer(np.arange(height) * chance.uniform(1, 4), np.arange(width))
    pixels = (waves[:, :, None] * chance.uniform(0.5, 2, 3) + chance.integers(0, 40, 3)) % 256
    return Image.fromarray(pixels.astype(np.uint8))


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def chunk(name: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def png(
    width: int, height: int, rows: bytes, more: bytes = b"", depth: int = 8, color: int = 2
) -> bytes:
    """Return a PNG of raw rows, each with its filter byte; `more` are chunks before the pixels."""
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)),
            more,
            chunk(b"IDAT", zlib.compress(rows)),
            chunk(b"IEND", b""),
        )
    )


def gif(width: int, height: int, frame_width: int, frame_height: int, disposal: int = 0) -> bytes:
    """Return a GIF whose frame need not fit its screen; of its pixels there is one."""
    return b"".join(
        (
            b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff",
            b"!\xf9\x04" + bytes([disposal << 2, 0, 0, 0]) + b"\0",
            b"," + struct.pack("<HHHH", 0, 0, frame_width, frame_height) + b"\0\x02\x02\x4c\x01\0;",
        )
    )


def webp_that_claims(width: int, height: int) -> bytes:
    data = bytearray(saved(noise(16, 16, 4), "WEBP", exif=turned(1)))
    assert data[12:16] == b"VP8X", "the kind whose canvas is told apart from its frame"
    data[24:30] = b"".join((side - 1).to_bytes(3, "little") for side in (width, height))
    return bytes(data)


def samples() -> dict[str, bytes]:
    """Return a small valid file of each format and mode that is read."""
    rgb, rgba = noise(13, 9), noise(13, 9, 4)
    wide = np.random.default_rng(2).integers(0, 65536, (9, 13), dtype=np.uint16)
    return {
        "png 1": saved(rgb.convert("1"), "PNG"),
        "png grey": saved(noise(13, 9, 1), "PNG"),
        "png grey alpha": saved(noise(13, 9, 2), "PNG"),
        "png palette": saved(rgb.convert("P"), "PNG", transparency=3),
        "png rgb": saved(rgb, "PNG", exif=turned(6)),
        "png rgba": saved(rgba, "PNG"),
        "png 16": saved(Image.fromarray(wide), "PNG"),
        "jpeg rgb": saved(rgb, "JPEG", exif=turned(8)),
        "jpeg grey": saved(noise(13, 9, 1), "JPEG", progressive=True),
        "jpeg cmyk": saved(rgb.convert("CMYK"), "JPEG"),
        "webp rgb": saved(rgb, "WEBP", lossless=True),
        "webp rgba": saved(rgba, "WEBP", exif=turned(3)),
        "gif": saved(rgb.convert("P"), "GIF", save_all=True, append_images=[rgb.convert("P")]),
        "gif clear": saved(rgb.convert("P"), "GIF", transparency=7),
    }

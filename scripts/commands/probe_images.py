"""Reads the image files that probes show, and judges what the turn behind them finds kept.

The healthy share is that of a turn of words behind images, with a system prompt of an agent's.
"""

import argparse
import base64
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hearth.commands.server_client import ProbeError, Row, Server

IMAGE_HIT_MIN: Final = 0.94  # of the second turn's prompt


@dataclass(frozen=True, slots=True)
class ProbeImage:
    """A file as both dialects show it. Immutable."""

    media_type: str
    data: str  # base64

    @property
    def chat_part(self) -> Row:
        url = f"data:{self.media_type};base64,{self.data}"
        return {"type": "image_url", "image_url": {"url": url}}

    @property
    def messages_block(self) -> Row:
        source = {"type": "base64", "media_type": self.media_type, "data": self.data}
        return {"type": "image", "source": source}


def add_image_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--image",
        action="append",
        type=Path,
        default=[],
        metavar="PATH",
        help="show this image (PNG, JPEG, WebP or GIF); may be repeated",
    )
    parser.add_argument(
        "--image-hit",
        type=float,
        default=IMAGE_HIT_MIN,
        help="what the turn behind the images must reach",
    )


async def probe_images(options: argparse.Namespace, server: Server) -> list[ProbeImage]:
    """Return the images that `options` name.

    Raises:
        ProbeError: a file cannot be read, or the model reads text only.
    """
    images = [_read(path) for path in options.image]
    if images and not await server.takes_images():
        raise ProbeError(
            f"{await server.model_name()} reads text only, as /v1/models says. Leave --image out, "
            "name a vision model (--model), or serve one (MODEL_PATH)"
        )
    return images


def _read(path: Path) -> ProbeImage:
    media_type = mimetypes.guess_type(path.name)[0] or ""
    if not media_type.startswith("image/"):
        raise ProbeError(f"{path} is no image by its name: use .png, .jpg, .webp or .gif")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProbeError(f"{path} cannot be read: {error}") from error
    return ProbeImage(media_type, base64.b64encode(data).decode())


def hit_misses(prompt: int, cached: int, hit_min: float) -> Sequence[str]:
    """Return the reason why the turn behind the images is not healthy; none where it is."""
    hit = cached / prompt
    if hit >= hit_min:
        return ()
    return (
        f"image: turn 2 hit {hit:.4f}, expected {hit_min}: {prompt - cached:,} of {prompt:,} "
        "tokens were read again or are new (hearth why SESSION tells which)",
    )

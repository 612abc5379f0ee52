"""Asks about an image, talks on with the image in the history, then shows a second one."""

import base64
import io
from typing import Any, Final

from PIL import Image, ImageDraw

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.workload import Measured, Start, Visit, Workload
from hearth.commands.bench.workloads.ask import ask
from hearth.commands.bench.workloads.counted_tokens.counted import measured
from hearth.commands.bench.workloads.filler import filler
from hearth.commands.bench.workloads.server_lives.made_sessions import QUESTION_TOKENS, chat_turns
from hearth.commands.bench.workloads.sessions import salt
from hearth.commands.replay.traces import Captured

NAME: Final = "images"
TURNS: Final = 4
SYSTEM_TOKENS: Final = 300
IMAGE_SIZE: Final = (640, 480)
SHAPES: Final = 24


def picture(number: int) -> bytes:
    """Return a PNG of shapes of many colours; each number has its own."""
    width, height = IMAGE_SIZE
    image = Image.new("RGB", IMAGE_SIZE, (240, 240 - 40 * (number % 5), 200))
    draw = ImageDraw.Draw(image)
    for shape in range(SHAPES):
        place = (
            (number * 97 + shape * 61) % (width - 80),
            (number * 53 + shape * 89) % (height - 80),
        )
        color = ((shape * 37) % 256, (shape * 91 + number * 29) % 256, (shape * 53) % 256)
        box = (*place, place[0] + 40 + shape, place[1] + 60 - shape)
        (draw.ellipse if shape % 2 else draw.rectangle)(box, fill=color)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def image_part(number: int) -> dict[str, Any]:
    """Return the image as a chat message shows it."""
    data = base64.b64encode(picture(number)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def image_session(words_first: str) -> list[Captured]:
    """Return three turns of which the first shows an image, and one that shows another."""
    said = [filler(QUESTION_TOKENS, f"{NAME} {turn}") for turn in range(TURNS)]
    first, *between, last = said
    return chat_turns(
        NAME,
        0,
        words_first + filler(SYSTEM_TOKENS, NAME),
        [_asked(1, first), *between, _asked(2, last)],
        NAME,
    )


def _asked(number: int, text: str) -> list[dict[str, Any]]:
    return [image_part(number), {"type": "text", "text": text}]


async def run(visit: Visit) -> Measured:
    async with measuring(visit) as taken:
        done = await ask(visit, image_session(salt(visit, NAME)), is_serial=True)
    return measured(done, taken.values())


WORKLOADS: Final = (
    Workload(
        NAME,
        "Three turns with an image in the history, then a turn with a second image.",
        Start.FRESH,
        run,
        needs_images=True,
    ),
)

"""Puts images into a prompt: each that its messages name is read once, and named by its digest."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from hearth.proxy.images.image_fetch import ImageFetcher
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt

IMAGES_MAX: Final = 100  # in one request; one that is shown twice counts twice
IMAGES_BYTES_MAX: Final = 48 * 1024 * 1024  # of one request's files; what comes twice counts once
IMAGES_WAIT_S_MAX: Final = 60.0  # for all of a request, the wait for their turn included


def shows_images(prompt: Prompt) -> bool:
    return any(_image_parts(prompt))


async def with_images(prompt: Prompt, images: ImageFetcher, hold: Callable[[int], None]) -> Prompt:
    """Return `prompt` with the files that its images' urls hold or lead to.

    `hold` is told the bytes of each file that is kept, and may raise. Cancelled, or at the first
    refusal, it leaves nothing running but a slice of decoding.

    Raises:
        RequestError: there are too many, they are too large or too slow together, or one cannot
            be had; it names the place of the one.
    """
    places = _places(prompt)
    files: dict[str, bytes] = {}

    async def read(url: str, param: str) -> str:
        try:
            image = await images.read(url)
        except RequestError as error:
            raise RequestError(f"{param}: {error}", code=error.code, param=param) from None
        if image.digest not in files:
            hold(len(image.data))
            files[image.digest] = image.data
            if (count := sum(map(len, files.values()))) > IMAGES_BYTES_MAX:
                text = (
                    f"The images of this request, as far as {param}, are {count:,} bytes together "
                    f"and this server accepts {IMAGES_BYTES_MAX:,}. Send fewer, or smaller ones."
                )
                raise RequestError(text, code="images_too_large", param=param)
        return image.digest

    tasks = {url: asyncio.create_task(read(url, param)) for url, param in places.items()}
    try:
        async with asyncio.timeout(IMAGES_WAIT_S_MAX):
            await asyncio.gather(*tasks.values())
    except TimeoutError:
        cut_off = [param for url, param in places.items() if tasks[url].cancelled()]
        late, *_ = cut_off or places.values()
        text = (
            f"{late}: The images of this request were not all here within {IMAGES_WAIT_S_MAX:g} s. "
            "Send them as data: URLs, or fewer."
        )
        raise RequestError(text, code="images_too_slow", param=late) from None
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    digests = {url: task.result() for url, task in tasks.items()}
    messages = [_shown(message, digests) for message in prompt.messages]
    first: dict[str, str] = {}
    for url, digest in digests.items():
        first.setdefault(digest, places[url])
    return replace(prompt, messages=messages, images=files, places=first)


def _image_parts(prompt: Prompt) -> Iterator[dict[str, Any]]:
    for message in prompt.messages:
        if type(message["content"]) is list:
            yield from (part for part in message["content"] if part["type"] == "image")


def _places(prompt: Prompt) -> dict[str, str]:
    """Return the distinct urls of the images, and the first place of each."""
    places: dict[str, str] = {}
    for count, part in enumerate(_image_parts(prompt), start=1):
        places.setdefault(part["url"], part["param"])
        if count > IMAGES_MAX:
            text = f"The request shows over {IMAGES_MAX} images, which is what this server accepts."
            text += " Send fewer."
            raise RequestError(text, code="too_many_images", param=part["param"])
    return places


def _shown(message: dict[str, Any], digests: dict[str, str]) -> dict[str, Any]:
    """Return `message` with its images named by their digests."""
    if type(message["content"]) is not list:
        return message
    parts = [
        {"type": "image", "image": digests[part["url"]]} if part["type"] == "image" else part
        for part in message["content"]
    ]
    return message | {"content": parts}

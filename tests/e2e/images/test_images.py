"""Images through the real proxy, by the official SDK: the worker gets the very bytes."""

import base64
from collections.abc import Iterator
from hashlib import blake2b, sha256
from typing import Any

import openai
import pytest

from tests.helpers.servers.fake_server import FakeServer

LARGEST = b"\x89PNG\r\n\x1a\n".ljust(20 * 1024 * 1024, b"\0")


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer(ALLOW_IMAGE_URLS="true") as running:
        yield running


def show(fake: FakeServer, url: str) -> None:
    """Ask about the image at `url`."""
    parts: Any = [{"type": "text", "text": "n=1"}, {"type": "image_url", "image_url": {"url": url}}]
    with fake.openai() as gpt:
        asked: Any = [{"role": "user", "content": parts}]
        gpt.chat.completions.create(model="gpt-x", messages=asked)


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_the_largest_image_arrives_whole(fake: FakeServer) -> None:
    show(fake, data_url(LARGEST))
    name = blake2b(LARGEST, digest_size=16).hexdigest()
    assert fake.events("Submit")[-1]["images"] == {name: sha256(LARGEST).hexdigest()}
    with pytest.raises(openai.BadRequestError) as caught:
        show(fake, data_url(LARGEST + b"more"))
    assert caught.value.code == "image_too_large"
    assert caught.value.param == "messages[0].content[1].image_url"


def test_urls_are_fetched_where_that_is_allowed_but_none_of_this_machine(fake: FakeServer) -> None:
    """What is fetched, and how often, is in tests/unit/proxy/images."""
    with pytest.raises(openai.BadRequestError) as caught:
        show(fake, f"{fake.url}/dashboard/icon.svg")
    assert "ALLOW_IMAGE_URLS" not in str(caught.value), str(caught.value)

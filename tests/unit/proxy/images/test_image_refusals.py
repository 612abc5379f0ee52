"""Checks the error that a client gets for an image that the proxy refuses."""

import asyncio

import pytest

from hearth.proxy.images.image_fetch import ImageFetcher
from hearth.shared.errors import RequestError


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (
            "iVBORw0KGgo=",
            "begins with 'iVBORw0KGgo='. Before bare base64 put data:image/png;base64,",
        ),
        ("file:///etc/passwd", "begins with 'file:///etc/passwd'"),
        ("data:application/pdf;base64,AAAA", "begins with 'data:application/pdf;base64'"),
        ("data:image/png;base64,AAAAA", "5 characters, not whole groups of four"),
        ("data:image/png;base64,AA\nA", "Only base64 data is allowed"),
        ("data:image/png;base64,", "it begins with nothing"),
        ("data:image/png;base64,PHN2Zz4=", "it begins with 3c 73 76 67 3e. Send it as one"),
        (
            "data:image/png;base64," + "A" * 28_000_000,
            "An image has 21,000,000 bytes and this server accepts 20,971,520. Send a smaller one.",
        ),
    ],
    ids=range(8),
)
def test_a_refusal_says_what_came_and_what_is_read(url: str, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        asyncio.run(ImageFetcher(allows_urls=False).read(url))
    assert caught.value.status == 400 and told in str(caught.value)

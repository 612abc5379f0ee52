"""Images through the real proxy, by the official SDKs: the worker gets the very bytes."""

import base64
import threading
from collections.abc import Iterator
from hashlib import blake2b, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

from tests.helpers.servers.fake_server import LAUNCH, FakeServer

# Only the test's own web server stands for the internet.
OPENED = """
import functools
from hearth.proxy.api import parse_any_dialect as parse_body
from hearth.proxy.images import image_fetch
make = image_fetch.ImageFetcher
parse_body.ImageFetcher = functools.partial(make, is_allowed=lambda address: address == "127.0.0.1")
"""
PNG, JPEG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40, b"\xff\xd8\xff" + b"jpeg" * 9


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    server = FakeServer(ALLOW_IMAGE_URLS="true")
    try:
        server.start("-c", OPENED + LAUNCH)
        server.wait_until_ready()
        yield server
    finally:
        server.__exit__()


@pytest.fixture(scope="module")
def gpt(fake: FakeServer) -> Iterator[openai.OpenAI]:
    with fake.openai() as client:
        yield client


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def code(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{code(data)}"


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "image", "image": digest(data)}


def was_sent(fake: FakeServer, *files: bytes, kind: str = "Submit") -> list[Any]:
    """Return the contents of the messages that came last, with exactly these files."""
    row = fake.events(kind)[-1]
    assert row["images"] == {digest(data): sha256(data).hexdigest() for data in files}
    return [message["content"] for message in row["prompt"]["messages"]]


def chat_parts(*urls: str, said: str = "n=1") -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"type": "text", "text": said}, *images]


# ---------------------------------------------------------------- in each dialect


def test_the_largest_image_arrives_whole(fake: FakeServer, gpt: openai.OpenAI) -> None:
    large = PNG + bytes(20 * 1024 * 1024 - len(PNG))
    rows: list[Any] = [{"role": "user", "content": chat_parts(data_url(large))}]
    gpt.chat.completions.create(model="gpt-x", messages=rows)
    assert was_sent(fake, large)
    rows = [{"role": "user", "content": chat_parts(data_url(large + b"more"))}]
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.chat.completions.create(model="gpt-x", messages=rows)
    assert caught.value.code == "image_too_large"
    assert caught.value.param == "messages[0].content[1].image_url"


# ---------------------------------------------------------------- by their urls


class Site(ThreadingHTTPServer):
    """Serves /png and /jpeg, and counts what it was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        found = {"/png": PNG, "/jpeg": JPEG}.get(self.path)
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(found or b"")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_urls_are_fetched_where_that_is_allowed_each_once(
    fake: FakeServer, gpt: openai.OpenAI, site: Site
) -> None:
    urls = [f"{site.url}/png", f"{site.url}/jpeg", f"{site.url}/png"]
    rows: list[Any] = [{"role": "user", "content": chat_parts(*urls)}]
    gpt.chat.completions.create(model="gpt-x", messages=rows)
    (parts,) = was_sent(fake, PNG, JPEG)
    assert parts[1:] == [shown(PNG), shown(JPEG), shown(PNG)]
    assert sorted(site.asked) == ["/jpeg", "/png"]

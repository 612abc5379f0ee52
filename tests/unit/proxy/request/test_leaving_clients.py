"""A client that leaves while its image or its document is read ends the reading, and its room."""

import asyncio
import base64
from typing import Any

import orjson
import pytest

from hearth.proxy.documents.prompt_documents import DocumentReader
from hearth.proxy.images.prompt_images import ImageFetcher
from tests.helpers.proxy.proxy_app import app_of, asked

PARTS = {
    "a document": {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": base64.b64encode(b"%PDF-1.7 ").decode()},
    },
    "an image": {"type": "image_url", "image_url": "data:image/png;base64,iVBORw0KGgo="},
}


class Never:
    """Reads without an end; `ended` is set once nobody waits for it."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def __call__(self, *_: Any) -> Any:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/cache/prefill"])
@pytest.mark.parametrize("what", PARTS)
async def test_what_a_client_shows_is_not_waited_for_once_it_has_left(
    what: str, path: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge, never, left = app_of(tmp_path), Never(), asyncio.Event()
    edge.local.body_parser.documents = DocumentReader(never)
    monkeypatch.setattr(ImageFetcher, "read", never)
    body = {"messages": [{"role": "user", "content": [PARTS[what]]}]}
    reading = asked(edge, "POST", path, body=orjson.dumps(body), gone=left)
    serving = asyncio.create_task(reading)
    await never.begun.wait()
    assert edge.body_budget.bytes_held > 0
    left.set()
    assert (await serving).status == 0, "nobody is there"
    assert never.ended.is_set() and edge.body_budget.bytes_held == 0

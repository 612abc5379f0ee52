"""Messages tells of an image in the words and at the place at which Claude Code leaves it out.

Claude Code reads `messages.N.content.M(.tool_result.content.K).image` and `Could not process image`
in a 400, takes that block out and goes on. Six others end its session with what it shows.
"""

import base64
from collections.abc import Iterator
from typing import Any, Final

import orjson
import pytest

from hearth.proxy.api.chat_completions.errors import openai_error
from hearth.proxy.api.messages.errors import anthropic_error
from hearth.proxy.images.prompt_images import IMAGES_MAX
from hearth.shared.errors import RequestError
from tests.helpers.proxy.app_over_workers import Front, front

Block = dict[str, Any]


def encoded(data: bytes, kind: str = "image/png") -> Block:
    source = {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def of_source(**source: Any) -> Block:
    return {"type": "image", "source": source}


UNREADABLE: Final[dict[str, Block]] = {
    "HEIC": encoded(b"\0\0\0\x18ftypheic" + bytes(40), "image/heic"),
    "SVG": encoded(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
    "BMP": encoded(b"BM" + bytes(60), "image/bmp"),
    "TIFF": encoded(b"II*\0" + bytes(60), "image/tiff"),
    "ICO": encoded(b"\0\0\1\0" + bytes(60), "image/x-icon"),
    "a PDF": encoded(b"%PDF-1.4", "application/pdf"),
    "empty": of_source(type="base64", media_type="image/png", data=""),
    "no base64": of_source(type="base64", media_type="image/png", data="!!!"),
    "half a group": of_source(type="base64", media_type="image/png", data="iVBORw0KG"),
    "no data": of_source(type="base64", media_type="image/png"),
    "a number": of_source(type="base64", media_type="image/png", data=5),
    "no type": of_source(type="base64", data="AAAA"),
    "no source": {"type": "image"},
    "a null": {"type": "image", "source": None},
    "a file's id": of_source(type="file", file_id="x"),
    "an address": of_source(type="url", url="https://images.example/x.png"),
    "no address": of_source(type="url", url="ftp://images.example/x.png"),
    "too large": encoded(b"\x89PNG\r\n\x1a\n" + bytes(20 * 1024 * 1024 + 1)),
}
CALL: Final = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
TEXT: Final = {"type": "text", "text": "x"}


def conversations(block: Block) -> Iterator[tuple[str, list[Any]]]:
    """Yield the places where an image can stand, as Anthropic says them, and what has one there."""
    yield "messages.0.content.1.image", [{"role": "user", "content": [TEXT, block]}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, block]}
    called = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [CALL]}]
    yield (
        "messages.2.content.0.tool_result.content.1.image",
        [*called, {"role": "user", "content": [result]}],
    )
    document = {"type": "document", "source": {"type": "content", "content": [block]}}
    yield "", [{"role": "user", "content": [document]}]
    answered = {"role": "assistant", "content": [block]}
    yield "messages.1.content.0.image", [*called[:1], answered, *called[:1]]


async def refused(made: Front, path: str, messages: list[Any], **fields: Any) -> str:
    """Return what a client is told that sends `messages`, which show an image."""
    body = orjson.dumps({"model": "claude-x", "max_tokens": 9, "messages": messages} | fields)
    reply = await made.ask("POST", path, body=body)
    assert reply.status == 400, reply.content[:300]
    assert reply.json["error"]["type"] == "invalid_request_error"
    message: str = reply.json["error"]["message"]
    return message


@pytest.mark.process
async def test_an_image_that_cannot_be_read_ended_a_session_of_claude_code() -> None:
    async with front(1) as made:
        for name, block in UNREADABLE.items():
            for place, messages in conversations(block):
                if name == "too large" and not place:
                    continue
                told = await refused(made, "/v1/messages", messages)
                assert "Could not process image: messages[" in told, (name, told)
                assert told.startswith(f"{place}: " if place else "Could not"), (name, told)
                for path, stream in (("/v1/messages", True), ("/v1/messages/count_tokens", 0)):
                    fields = {"stream": True} if stream else {}
                    assert (await refused(made, path, messages, **fields)) == told, (name, path)
        many = [{"role": "user", "content": [encoded(b"\x89PNG")] * (IMAGES_MAX + 1)}]
        assert "Could not process image: " in await refused(made, "/v1/messages", many)


@pytest.mark.parametrize(
    ("code", "text", "place"),
    [  # what a worker and its reader of images say, who know the place by its text alone
        ("image_broken", "messages[2].content[0].content[1].source: The image, a PNG", "2.0.1"),
        ("image_type", "messages[12].content[3].source: The image is HEIC;", "12.3"),
        ("image_too_many_pixels", "messages[0].content[0].source: The image has", "0.0"),
        ("unsupported_content", "messages[1].content[2].source is an image, and m reads", "1.2"),
        ("image_refused", "The model cannot encode the image of 9 tokens", ""),
        ("unsupported_content", "messages is an image, and m reads text only", ""),
        ("images_too_large", "The images of this request, as far as messages[0].content[1]", ""),
    ],
)
def test_a_workers_refusal_of_an_image_is_in_the_clients_words(
    code: str, text: str, place: str
) -> None:
    error = RequestError(text, code=code)
    message, block, *inner = place.split(".") if place else ("", "")
    nested = f".tool_result.content.{inner[0]}" if inner else ""
    head = f"messages.{message}.content.{block}{nested}.image: " if place else ""
    assert anthropic_error(error)["message"] == f"{head}Could not process image: {text}"
    assert openai_error(error)["message"] == text


@pytest.mark.parametrize(
    "error",
    [
        RequestError("messages[0].content[0].source: The PDF is broken.", code="document_broken"),
        RequestError("messages[0].content[0].type is 5; allowed is the type of a content block"),
        RequestError("model 'image-1' is not served here.", code="model_not_found"),
        RequestError("tools[0].name is 'image'; allowed is", code="invalid_request"),
        RequestError("messages[0].content[0] is of type 'audio'; text", code="unsupported_content"),
    ],
    ids=str,
)
def test_no_other_refusal_has_claude_code_take_images_out(error: RequestError) -> None:
    assert anthropic_error(error)["message"] == str(error)

"""Puts marks in the place of images while text is rendered, and then the images' tokens.

A template is given texts only, with a mark where an image stands, so that it shows images
wherever it shows text, in tools' results too. Any prompt thread. Touches no MLX.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.errors import RequestError
from hearth.shared.machine import VISION_REMEDY, has_vision
from hearth.shared.wire_messages import Prompt
from hearth.worker.cache.image_keys import PromptImage
from hearth.worker.prompt.tokenise import PieceTokeniser, TextPiece

_SHOWN: Final = "\ufffc"  # what Unicode has for an object in a text

_NOTICE: Final = {"type": "text", "text": "[image omitted: this model reads text only]"}


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The text that a model's processor writes around each image. Immutable."""

    before: str = ""
    after: str = ""


def marked(messages: list[dict[str, Any]], mark: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages with texts for content, and the digests of the images in them.

    The mark of an image is one text with the texts beside it; two texts side by side stay two.

    `mark` is in none of them but for what shields their control tokens, which never puts two
    together.
    """
    assert mark, "only a mark shows where an image stands"
    digests: list[str] = []
    shown = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            texts = [_text(part, mark, digests) for part in content[:1]]
            for before, part in itertools.pairwise(content):
                text = _text(part, mark, digests)
                is_apart = before["type"] == part["type"] == "text"
                texts += [text] if is_apart else [texts.pop() + text]
            parts = [{"type": "text", "text": text} for text in texts]
            message = {**message, "content": parts if len(parts) > 1 else "".join(texts)}
        shown.append(message)
    return shown, digests


def _text(part: dict[str, Any], mark: str, digests: list[str]) -> str:
    if part["type"] == "text":
        return str(part["text"])
    digests.append(part["image"])
    return f"{mark}{mark}{len(digests) - 1}{mark}{mark}"


def pieces_of(
    tokeniser: PieceTokeniser,
    text: str,
    mark: str,
    pictures: Sequence[PromptImage],
    form: ImageForm,
    owner: str = "",
) -> list[TextPiece]:
    """Return a rendered text as pieces, `pictures` in the places of their marks.

    Raises:
        RequestError: the template has left out a message with an image.
    """
    if not pictures:
        return tokeniser.pieces(text, mark, owner=owner)
    twice = re.escape(mark + mark)
    parts = re.split(f"{twice}([0-9]{{1,9}}?){twice}", text)
    if missing := set(range(len(pictures))) - {int(number) for number in parts[1::2]}:
        raise RequestError(
            f"The model's chat template leaves out {len(missing)} of the {len(pictures)} images in "
            "these messages. Send them in messages of the user.",
            param="messages",
        )
    pieces: list[TextPiece] = []
    for at, part in enumerate(parts):
        if at % 2:
            picture = pictures[int(part)]
            pieces.append(TextPiece(_SHOWN, picture.ids, is_added=False, picture=picture))
            continue
        before = form.after if at else ""
        after = form.before if at < len(parts) - 1 else ""
        text = f"{before}{part}{after}"
        pieces += tokeniser.pieces(text, mark, is_first=at == 0, owner=owner)
    return pieces


def without_images(prompt: Prompt, model: str) -> list[dict[str, Any]]:
    """Return the messages of `prompt` for a model that reads text only.

    An image in a tool's result becomes a notice: no client can take a result back.

    Raises:
        RequestError: another message shows one.
    """
    shown_messages = []
    for message in prompt.messages:
        content = message.get("content")
        if isinstance(content, list):
            shown = [part["image"] for part in content if part["type"] == "image"]
            if shown and message["role"] != "tool":
                place = prompt.places.get(shown[0], "messages")
                remedy = "" if has_vision() else f"{VISION_REMEDY} and "
                raise RequestError(
                    f"{place} is an image, and {model} reads text only. Remove the image, or "
                    f"{remedy}serve a vision model (MODEL_PATH).",
                    code="unsupported_content",
                    param="messages",
                )
            message = {
                **message,
                "content": [part if part["type"] == "text" else _NOTICE for part in content],
            }
        shown_messages.append(message)
    return shown_messages

"""Holds what was said, as each request sends it whole; reads the images that go with it."""

import base64
import re
import stat
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hearth.commands.chat.answer_stream import Turn

IMAGE_BYTES_MAX: Final = 20 * 1024 * 1024  # as the server has it
_MARKS: Final = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}
_SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".gif", ".webp")
_SENTENCE_ENDS: Final = ".,;:!?)"  # behind a path they are not of it
# A quote within a word, as in "it's", is none.
_WORD: Final = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|[^\s\\])+""", re.DOTALL)
_QUOTES: Final = re.compile(r"""^'([^']*)'$|^"([^"]*)"$|\\(.)""", re.DOTALL)

Row = dict[str, Any]


class ImageError(Exception):
    """A file is no image that can be sent; the text says why."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    name: str
    url: str  # data:

    @property
    def part(self) -> Row:
        return {"type": "image_url", "image_url": {"url": self.url}}


def read_image(path: Path) -> ImageFile:
    """Raises: ImageError: it cannot be read, is too large, or is no image of a known format."""
    try:
        about = path.stat()
        if stat.S_ISFIFO(about.st_mode) or stat.S_ISCHR(about.st_mode):  # they need not end
            raise ImageError(f"{path} is no file.")
        if (size := about.st_size) > IMAGE_BYTES_MAX:
            text = f"{path} has {size:,} bytes; an image has {IMAGE_BYTES_MAX:,} at most."
            raise ImageError(text)
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ImageError(f"{path} cannot be read: {reason}.") from None
    kind = next((kind for mark, kind in _MARKS.items() if data.startswith(mark)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "webp"
    if not kind:
        raise ImageError(f"{path} is no PNG, JPEG, GIF or WebP.")
    return ImageFile(path.name, f"data:image/{kind};base64,{base64.b64encode(data).decode()}")


def image_paths(text: str) -> dict[str, Path]:
    """Return the files in `text` that end like an image, by the words that name them.

    A word is one as a shell reads it: a terminal pastes a file that is dropped on it with quotes or
    backslashes. What names no file stays text.
    """
    found = {}
    for word, plain in word_places(text):
        name = plain.rstrip(_SENTENCE_ENDS)
        if name.lower().endswith(_SUFFIXES) and _is_file(path := _home_expanded(name)):
            found[word.rstrip(_SENTENCE_ENDS)] = path
    return found


def _home_expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~ of a user who is none
        return Path(name)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long, or its directory is not the user's to read
        return False


def word_places(text: str) -> list[tuple[str, str]]:
    """Return the words of `text` as they stand there, and without quotes and backslashes."""
    words = _WORD.findall(text)
    return [(word, _QUOTES.sub(r"\1\2\3", word)) for word in words]


@dataclass(slots=True)
class Conversation:
    """The messages so far, as chat completions have them; `session` is its name at the server."""

    messages: list[Row] = field(default_factory=list)
    session: str = field(default_factory=lambda: f"chat-{uuid.uuid4().hex[:12]}")

    def body(self, model: str, context_tokens: int | None) -> Row:
        """Return the request; its answer may be as long as the context has room for."""
        body: Row = {"model": model, "messages": self.messages}
        return body if context_tokens is None else body | {"max_tokens": context_tokens}

    def question(self, text: str, images: list[ImageFile]) -> None:
        text = text.encode(errors="replace").decode()  # a terminal may give bytes of no UTF-8
        content: str | list[Row] = text
        if images:
            content = [*(image.part for image in images), {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": content})

    def answered(self, turn: Turn) -> bool:
        """Keep what was said, also of an answer that was stopped; without any forget the question.

        Return whether it was kept.

        Thinking goes back too: the server knows its turn by all that it said.
        """
        assert self.messages and self.messages[-1]["role"] == "user", self.messages[-1:]
        if not turn.text and not turn.thinking:
            self.messages.pop()
            return False
        message = {"role": "assistant", "content": turn.text}
        if turn.thinking:
            message["reasoning_content"] = turn.thinking
        self.messages.append(message)
        return True

"""Joins the pieces of a message's content: texts, and what is named until it is read.

A piece is a text, or a record with a `type`: the image or the document that stands there.
"""

import itertools
from collections.abc import Sequence
from typing import Any

ContentPart = str | dict[str, Any]
MessageContent = str | list[Any]  # of a message, as hearth.shared.wire_messages.Prompt has it


def join(pieces: Sequence[ContentPart]) -> MessageContent:
    """Return `pieces` as a message's content: a string where one text is all, else parts."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) == len(pieces) < 2:
        return join_text(texts)
    return [{"type": "text", "text": each} if isinstance(each, str) else each for each in pieces]


def as_one(pieces: list[ContentPart]) -> list[ContentPart]:
    """Return the pieces of one block of a client's: one text where they are texts only."""
    text = merged(join(pieces))
    return [text] if pieces and isinstance(text, str) else pieces


def merged(content: MessageContent) -> MessageContent:
    """Return `content` with neighbouring texts as one: what it says, however it was cut."""
    if isinstance(content, str):
        return content
    parts: list[Any] = []
    for is_text, run in itertools.groupby(content, lambda part: bool(part["type"] == "text")):
        told = list(run)
        parts += [{"type": "text", "text": text_of(told)}] if is_text else told
    return text_of(parts) if [part["type"] for part in parts] == ["text"] else parts


def text_of(content: MessageContent) -> str:
    """Return the texts of `content` as one string, each on its own line."""
    if isinstance(content, str):
        return content
    return join_text([part["text"] for part in content if part["type"] == "text"])


def join_text(parts: list[str]) -> str:
    """Return text parts as one string, each on its own line."""
    return "\n".join(parts)

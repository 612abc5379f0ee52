"""Joins the pieces of a message's content.

A piece is a text, or an object that stands for an image or a document, which is read later.
"""

import itertools
from collections.abc import Sequence
from typing import Any

ContentPart = str | dict[str, Any]
MessageContent = str | list[Any]  # content of a message in wire_messages.Prompt


def join(pieces: Sequence[ContentPart]) -> MessageContent:
    """Return `pieces` as a content: a string for at most one text, else a list of parts."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) == len(pieces) < 2:
        return join_text(texts)
    return [
        {"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in pieces
    ]


def joined_if_texts(pieces: list[ContentPart]) -> list[ContentPart]:
    """Return the pieces of one block, joined to one text if all of them are texts."""
    text = merge_texts(join(pieces))
    return [text] if pieces and isinstance(text, str) else pieces


def merge_texts(content: MessageContent) -> MessageContent:
    """Return `content` with neighbouring texts joined, so that equal contents compare equal."""
    if isinstance(content, str):
        return content
    parts: list[Any] = []
    for is_text, group in itertools.groupby(content, lambda part: bool(part["type"] == "text")):
        neighbours = list(group)
        parts += [{"type": "text", "text": text_of(neighbours)}] if is_text else neighbours
    return text_of(parts) if [part["type"] for part in parts] == ["text"] else parts


def text_of(content: MessageContent) -> str:
    """Return the texts of `content` as one string, each on its own line."""
    if isinstance(content, str):
        return content
    return join_text([part["text"] for part in content if part["type"] == "text"])


def join_text(parts: list[str]) -> str:
    """Return text parts as one string, each on its own line."""
    return "\n".join(parts)

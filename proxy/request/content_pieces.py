"""Joins the pieces of a message's content: texts, and what is named until it is read.

A piece is a text, or a record with a `type`: the image or the document that stands there.
"""

from typing import Any

ContentPart = str | dict[str, Any]
MessageContent = str | list[Any]  # of a message, as hearth.shared.wire_messages.Prompt has it


def join(pieces: list[ContentPart]) -> MessageContent:
    """Return `pieces` as a message's content: one string, or parts where others are among them.

    Neighbouring texts are joined as `join_text` does; a part without any text is left out.
    """
    parts: list[Any] = []
    texts: list[str] = []

    def flush() -> None:
        if text := join_text(texts):
            parts.append({"type": "text", "text": text})
        texts.clear()

    for piece in pieces:
        if type(piece) is str:
            texts.append(piece)
        else:
            flush()
            parts.append(piece)
    if not parts:
        return join_text(texts)
    flush()
    return parts


def join_text(parts: list[str]) -> str:
    """Return text parts as the one string that chat templates read, each on its own line."""
    return "\n".join(parts)

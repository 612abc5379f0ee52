"""Builds HTML out of text that is escaped unless it is HTML already."""

import html
from typing import Final

VOID: Final = {"meta", "line", "path", "rect", "circle", "use", "br", "col"}


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def safe(text: str) -> Html:
    """Return text as HTML that shows it, whatever it holds."""
    return text if isinstance(text, Html) else Html(html.escape(text))


def joined(*parts: str) -> Html:
    """Return the parts one after another; those that are plain text are escaped."""
    return Html("".join(safe(part) for part in parts))


def tag(element: str, /, *parts: str, **attributes: str | float | None) -> Html:
    """Return an element. `class_` is `class`, `_` is `-`, an attribute of None is left out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if element in VOID:
        assert not parts, (element, parts)
        return Html(f"<{element}{told}/>")
    return Html(f"<{element}{told}>{joined(*parts)}</{element}>")


def with_code(text: str) -> Html:
    """Return text whose `quoted` words are code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # a quote that nobody closed is a character
        return safe(text)
    return joined(*(tag("code", each) if at % 2 else each for at, each in enumerate(pieces)))

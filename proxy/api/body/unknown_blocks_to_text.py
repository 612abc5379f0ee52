"""Leaves out what only other servers run: hosted tools, their calls and results, and the like.

A client that moves here with such a history must be answered. The text of it stays, the rest is
left out, and one line of the log says so.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any, Final

log = logging.getLogger(__name__)

_NAMED_MAX: Final = 20  # kinds in one line of the log
_KIND: Final = re.compile(r"(tool_choice )?[a-z][a-z0-9_]{0,59}")  # words of an API
_TEXTS: Final = ("title", "url", "text", "stdout", "stderr", "logs")
_HOLDERS: Final = ("content", "source", "summary", "output", "outputs", "result", "results")


def texts_of(value: Any) -> list[str]:
    """Return the readable texts in `value`, JSON of a kind that this server does not know."""
    if type(value) is str:
        return [value] if value.strip() else []
    if type(value) is list:
        return [text for item in value for text in texts_of(item)]
    if type(value) is not dict:
        return []
    found = [value[name] for name in _TEXTS if type(value.get(name)) is str and value[name].strip()]
    if value.get("type") == "text" and type(value.get("data")) is str:
        found.append(value["data"])
    for name in _HOLDERS:
        if value.get("type") not in _OPAQUE and name in value:
            found += texts_of(value[name])
    return found


# Their content is base64 or the like.
_OPAQUE: Final = ("base64", "file", "image_generation_call", "computer_call_output")


def note(kinds: Iterable[str]) -> None:
    """Log once what of a request this server has no use for."""
    named = sorted({kind if _KIND.fullmatch(kind) else "(other)" for kind in kinds})
    if named:
        log.info("left out kinds=%r", ", ".join(named[:_NAMED_MAX]))

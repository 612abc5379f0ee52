"""Reads settings that a user wrote for an agent: JSON, with comments and trailing commas."""

import json
import re
from typing import Any, Final

from hearth.shared.errors import StartError

Values = dict[str, Any]

_STRING: Final = r'("(?:[^"\\]|\\.)*")'
_COMMENT: Final = re.compile(rf"{_STRING}|//[^\r\n]*|/\*.*?\*/", re.S)
_LAST_COMMA: Final = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")


def json_in(text: str, name: str) -> Values:
    """Return the object that `text` is, an empty one where nothing is in it.

    Raises:
        StartError: it is none; the text names it by `name`.
    """
    plain = _COMMENT.sub(r"\1", text.removeprefix("\ufeff"))
    try:
        values = json.loads(_LAST_COMMA.sub(r"\1", plain).strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise StartError(f"{name} cannot be read: {error}. Mend it first.") from None
    if not isinstance(values, dict):
        raise StartError(f"{name} is no JSON object. Mend it first.")
    return values

"""Finds the patterns of a JSON schema, and how often each repeats a part of itself."""

import re
from dataclasses import dataclass
from typing import Any, Final

from hearth.worker.constraint.schema_references import escaped

REPEATS_MAX: Final = 10**12  # more than that are not told apart
_PIECE: Final = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<low>\d{1,12})(?:,(?P<high>\d{0,12}))?\}|.", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class SchemaPattern:
    """A pattern of a schema; `place` is its JSON pointer, `repeats` as of `repeats`. Immutable."""

    place: str
    pattern: str
    repeats: int

    def __str__(self) -> str:
        return (
            f"{self.pattern[:200]!r} at {self.place}, which repeats a part {self.repeats:,} times"
        )


def repeats(pattern: str) -> int:
    """Return how often the part of a pattern that is repeated most may stand, 1 where none is.

    The counts of repeats within each other are multiplied. `*` and `+` count as 1: they cost as
    much as one character.
    """
    inner, last, most = [1], 1, 1
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if text == "(":
            inner.append(1)
        elif text == ")" and len(inner) > 1:
            last = inner.pop()
            inner[-1] = max(inner[-1], last)
        elif piece["low"]:
            count = max(int(piece["low"]), int(piece["high"] or 0))
            last = min(last * max(count, 1), REPEATS_MAX)
            inner[-1] = max(inner[-1], last)
        else:
            last = 1
        most = max(most, last)
    return most


def patterns_of(schema: Any) -> list[SchemaPattern]:
    """Return all patterns of a schema, also those that names are held to."""
    found, todo = list[SchemaPattern](), [("", schema)]
    while todo:
        place, node = todo.pop()
        if isinstance(node, dict):
            if isinstance(node.get("pattern"), str):
                each = node["pattern"]
                found.append(SchemaPattern(f"{place}/pattern", each, repeats(each)))
            if isinstance(node.get("patternProperties"), dict):
                for name in node["patternProperties"]:
                    at = f"{place}/patternProperties/{escaped(name)}"
                    found.append(SchemaPattern(at, name, repeats(name)))
            todo += [(f"{place}/{escaped(str(key))}", part) for key, part in node.items()]
        elif isinstance(node, list):
            todo += [(f"{place}/{number}", part) for number, part in enumerate(node)]
    return found

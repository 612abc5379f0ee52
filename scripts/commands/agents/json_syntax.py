"""Reads JSON, JSON with comments and JSON5 into a tree that knows where in the text each value is.

Only what an edit needs: the text is never written anew from the tree.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.commands.agents.config_values import ConfigError

DEPTH_MAX: Final = 100
_BLANK: Final = re.compile(r"(?:[\s\ufeff]|//[^\r\n]*|/\*.*?\*/)+", re.S)
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"|' + r"'(?:[^'\\]|\\.)*'", re.S)
_WORD: Final = re.compile(r"[^\s,:{}\[\]\"'/]+")
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|\r\n|.)", re.S)
_ESCAPED: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}


@dataclass(frozen=True, slots=True)
class Word:
    """A literal that JSON does not have, as it is spelt: 0xFF, .5, Infinity."""

    text: str


@dataclass(slots=True)
class Node:
    """A value at `text[start:end]`; an object or a list has a `Part` for each of its own."""

    start: int
    end: int = 0
    value: Any = None
    parts: list["Part"] = field(default_factory=list)


@dataclass(slots=True)
class Part:
    """A member of an object, from its key on, or an element of a list."""

    name: str | None
    start: int
    node: Node
    comma: int | None = None  # where the comma after it is


def parse(text: str) -> Node:
    """Return the tree of `text`, whose top is an object; an empty one where nothing is in it.

    Raises:
        ConfigError: it is none.
    """
    reader = _Reader(text)
    if reader.skip_blank() == len(text):
        return Node(len(text), len(text), {})
    node = reader.value(0)
    if reader.skip_blank() != len(text) or not isinstance(node.value, dict):
        raise reader.error("an object and nothing behind it")
    return node


class _Reader:
    """Reads `text` from `at` on. Raises: ConfigError throughout."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def error(self, wanted: str) -> ConfigError:
        line = self.text.count("\n", 0, self.at) + 1
        return ConfigError(f"line {line} has no {wanted} where one must be")

    def skip_blank(self) -> int:
        found = _BLANK.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.at

    def takes(self, mark: str) -> bool:
        self.skip_blank()
        is_there = self.text.startswith(mark, self.at)
        self.at += len(mark) if is_there else 0
        return is_there

    def value(self, depth: int) -> Node:
        node = Node(self.skip_blank())
        if depth > DEPTH_MAX:
            raise ConfigError(f"values are nested deeper than {DEPTH_MAX}")
        if self.takes("{"):
            node.parts = list(self.parts("}", depth))
            node.value = {part.name: part.node.value for part in node.parts}
        elif self.takes("["):
            node.parts = list(self.parts("]", depth))
            node.value = [part.node.value for part in node.parts]
        else:
            node.value = self.scalar()
        node.end = self.at
        return node

    def parts(self, end: str, depth: int) -> Iterator[Part]:
        comma = True
        while not self.takes(end):
            if not comma:
                raise self.error(f"comma or {end}")
            start, name = self.skip_blank(), None
            if end == "}":
                name = self.name()
                if not self.takes(":"):
                    raise self.error("colon")
            part = Part(name, start, self.value(depth + 1))
            comma = self.takes(",")
            part.comma = self.at - 1 if comma else None
            yield part

    def name(self) -> str:
        start, value = self.at, self.scalar()
        return value if isinstance(value, str) else self.text[start : self.at]

    def scalar(self) -> Any:
        if found := _STRING.match(self.text, self.at):
            self.at = found.end()
            return _unquoted(found[0])
        if found := _WORD.match(self.text, self.at):
            self.at = found.end()
            return _literal(found[0])
        raise self.error("value")


def _unquoted(quoted: str) -> str:
    return (
        _ESCAPE.sub(_unescaped, quoted[1:-1])
        .encode("utf-16", "surrogatepass")
        .decode("utf-16", "surrogatepass")
    )


def _unescaped(found: re.Match[str]) -> str:
    escape = found[1]
    if escape[0] in "ux" and len(escape) > 1:
        return chr(int(escape[1:], 16))
    if escape in ("\n", "\r\n", "\r", "\u2028", "\u2029"):
        return ""
    return _ESCAPED.get(escape, escape)


def _literal(word: str) -> Any:
    try:
        return json.loads(word, parse_constant=Word)
    except ValueError:
        return Word(word)

"""Edits the text of a JSON, JSON with comments or JSON5 file and leaves all else in it as it is."""

import json
import re
from typing import Any, Final

from hearth.commands.agents.config_values import Keys, Values
from hearth.commands.agents.json_syntax import Node, Part, parse

INDENT: Final = "  "
# What may stand behind the last value of a line: the next one begins on a line of its own.
_REST_OF_LINE: Final = re.compile(r"[ \t]*(?://[^\r\n]*|/\*[^\r\n]*?\*/[ \t]*)?(?=\r?\n)")


def values_of(text: str) -> Values:
    """Return what `text` says. Raises: ConfigError."""
    values: Values = parse(text).value
    return values


def text_at(text: str, keys: Keys) -> str | None:
    """Return the text of the value at `keys`; None where there is none, or keys end with 0."""
    node: Node | None = parse(text)
    for key in keys:
        part = _part(node, key) if node else None
        node = part.node if part else None
    return text[node.start : node.end] if node else None


def set_value(text: str, keys: Keys, value: Any) -> str:
    """Return `text` with `value` at `keys`: instead of what is there, or behind all else."""
    if not text.strip("\ufeff \t\r\n"):
        text += "{}\n"
    node, depth = parse(text), 0
    while depth < len(keys) and (part := _part(node, keys[depth])):
        node, depth = part.node, depth + 1
    for key in reversed(keys[depth + 1 :]):
        value = [value] if key == 0 else {key: value}
    if depth == len(keys):
        return _replaced(text, node, _json(value))
    return _inserted(text, node, keys[depth], value)


def set_text(text: str, keys: Keys, value: str) -> str:
    """Return `text` with a value that reads `value` instead of the one at `keys`."""
    node = parse(text)
    for key in keys:
        part = _part(node, key)
        assert part is not None, keys
        node = part.node
    return text[: node.start] + value + text[node.end :]


def remove(text: str, keys: Keys, value: Any) -> str:
    """Return `text` without the `value` at `keys`, which is there."""
    node = parse(text)
    for key in keys[:-1]:
        part = _part(node, key)
        assert part is not None, keys
        node = part.node
    name = keys[-1]
    place = next(
        number
        for number, part in reversed(list(enumerate(node.parts)))
        if (part.node.value == value if name == 0 else part.name == name)
    )
    return _cut(text, node, place)


def _part(node: Node, key: str | int) -> Part | None:
    return next((part for part in reversed(node.parts) if part.name == key), None)


def _json(value: Any, indent: int | None = len(INDENT)) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False)


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _line_indent(text: str, at: int) -> str:
    """Return the blanks that the line of `at` begins with."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _replaced(text: str, node: Node, value: str) -> str:
    value = value.replace("\n", _newline(text) + _line_indent(text, node.start))
    return text[: node.start] + value + text[node.end :]


def _inserted(text: str, node: Node, name: str | int, value: Any) -> str:
    """Return `text` with a part more in `node`: an object's last, or a list's first."""
    lead = "" if name == 0 else f"{_json(name)}: "
    outer = _newline(text) + _line_indent(text, node.start)
    if not node.parts:
        inner = outer + INDENT
        entry = inner + lead + _json(value).replace("\n", inner)
        # Comments may be all that is in it.
        at = node.start + 1 + len(text[node.start + 1 : node.end - 1].rstrip())
        return text[:at] + entry + outer + text[node.end - 1 :]
    first, last = node.parts[0], node.parts[-1]
    is_long = "\n" in text[node.start : first.start]
    gap = _newline(text) + _line_indent(text, first.start) if is_long else " "
    entry = lead + _json(value, len(INDENT) if is_long else None).replace("\n", gap)
    if name == 0:
        return text[: first.start] + entry + "," + gap + text[first.start :]
    return _appended(text, node, last, gap, entry)


def _appended(text: str, node: Node, last: Part, gap: str, entry: str) -> str:
    """Return `text` with `entry` behind the part `last`, and behind a comment in its line."""
    at = last.node.end if last.comma is None else last.comma + 1
    head = text[:at] + ("," if last.comma is None else "")
    rest = _REST_OF_LINE.match(text, at)
    if "\n" in gap and rest and rest.end() < node.end:
        head, at = head + rest[0], rest.end()
    return head + gap + entry + ("" if last.comma is None else ",") + text[at:]


def _cut(text: str, node: Node, place: int) -> str:
    """Return `text` without the part number `place` of `node`, its comma and its empty lines."""
    part = node.parts[place]
    start, end = part.start, part.node.end
    if part.comma is not None:
        end = part.comma + 1
    if re.match(r"[ \t]*(\r?\n|\Z)", text[end:]):
        start = len(text[:start].rstrip(" \t\r\n"))
    cut = text[:start] + text[end:]
    if part.comma is None and place:
        comma = node.parts[place - 1].comma
        assert comma is not None
        cut = cut[:comma] + cut[comma + 1 :]
    return cut

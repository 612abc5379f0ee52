"""Edits the text of a TOML file and leaves all else in it as it is.

It sets keys of the top, and tables of the second level ([a.b]) as a whole. The caller reads the
result back: what stands in another form than is looked for here shows there.
"""

import json
import re
import tomllib
from typing import Any, Final

from hearth.commands.agents.config_values import ConfigError, Keys, Values

_HEADER: Final = re.compile(r"^[ \t]*\[.*$", re.M)


def values_of(text: str) -> Values:
    """Return what `text` says. Raises: ConfigError."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"it is no TOML: {error}") from None


def text_at(text: str, keys: Keys) -> str | None:
    """Return the text of the value at `keys`, a table's lines; None where there is none."""
    span = _span(text, keys)
    return text[slice(*span)] if span else None


def set_value(text: str, keys: Keys, value: Any) -> str:
    """Return `text` with `value` at `keys`."""
    if len(keys) == 1:
        return set_text(text, keys, _literal(value))
    lines = [f"{name} = {_literal(each)}\n" for name, each in value.items()]
    return set_text(text, keys, "".join(lines))


def set_text(text: str, keys: Keys, value: str) -> str:
    """As `set_value` does, with the text of a value, or with a table's lines."""
    newline = "\r\n" if "\r\n" in text else "\n"
    value = value.replace("\r\n", "\n").replace("\n", newline)
    if span := _span(text, keys):
        return text[: span[0]] + value + text[span[1] :]
    if len(keys) == 1:
        mark = "\ufeff" if text.startswith("\ufeff") else ""
        return f"{mark}{keys[0]} = {value}{newline}{text.removeprefix(mark)}"
    blank = "" if not text.strip("\ufeff") else newline if text.endswith("\n") else 2 * newline
    return f"{text}{blank}[{'.'.join(map(str, keys))}]{newline}{value}"


def remove(text: str, keys: Keys, value: Any) -> str:
    """Return `text` without the `value` at `keys`, which is there."""
    span = _span(text, keys)
    assert span is not None, (keys, value)
    if len(keys) == 1:
        return text[: text.rfind("\n", 0, span[0]) + 1] + text[text.find("\n", span[1]) + 1 :]
    head = text[: text.rfind("[", 0, span[0])]
    blank = re.search(r"(?<=\n)\r?\n[ \t]*\Z", head)
    return head[: blank.start() if blank else None] + text[span[1] :]


def _span(text: str, keys: Keys) -> tuple[int, int] | None:
    """Return where the value of a key is in its line, or the lines of a table below its header."""
    if len(keys) == 1:
        header = _HEADER.search(text)
        top = text[: header.start()] if header else text
        key = re.escape(str(keys[0]))
        found = re.search(rf"^[\ufeff \t]*\"?{key}\"?[ \t]*=[ \t]*([^\r\n]*)", top, re.M)
        return found.span(1) if found else None
    names = r"[ \t]*\.[ \t]*".join(rf"\"?{re.escape(str(key))}\"?" for key in keys)
    header = re.search(rf"^[ \t]*\[[ \t]*{names}[ \t]*\][^\n]*\n?", text, re.M)
    if header is None:
        return None
    following = _HEADER.search(text, header.end())
    lines = text[header.end() : following.start() if following else len(text)].splitlines(True)
    while lines and not lines[-1].split("#")[0].strip():
        lines.pop()
    return header.end(), header.end() + len("".join(lines))


def _literal(value: Any) -> str:
    """Return a string, number, truth value, list or inline table as TOML spells it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_literal(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

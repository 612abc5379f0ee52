"""Reads calls that a model writes as Python source, such as `[get_weather(city="Oslo")]`."""

import ast
import json
import logging
import re
import warnings
from typing import Any, Final

from hearth.worker.stream.tool_calls.request_tools import RequestTools

log = logging.getLogger(__name__)

PYTHON_CHARS_MAX: Final = 400_000  # of source that is parsed at once

_IN_A_NAME: Final = re.compile(r"[\w-]")
_OPENED: Final = re.compile(r"\s*\(")
_STRING: Final = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_ESCAPE_OR_BREAK: Final = re.compile(r"\\.|[\r\n]", re.DOTALL)
# A backslash in front of a raw break is text, too.
_BREAKS: Final = {"\n": "\\n", "\r": "\\r", "\\\n": "\\\\\\n", "\\\r": "\\\\\\r"}


def python_calls(text: str, tools: RequestTools) -> list[tuple[str, str]]:
    """Return the calls of tools that Python source consists of, none if it has anything else.

    A call is a name and its arguments' JSON.

    `print(...)` around a call, a module in front of it and a variable for its result are left out.
    Strings may have raw newlines.
    """
    if len(text) > PYTHON_CHARS_MAX:
        return []
    # All tools have names that Python takes.
    spelled = {f"_tool_{n}_": name for n, name in enumerate(tools.names) if not name.isidentifier()}
    source = text.strip()
    for written, name in spelled.items():
        source = _with_calls_of(written, name, source)
    calls = _calls_of(source, tools, spelled)
    unbroken = _STRING.sub(
        lambda string: _ESCAPE_OR_BREAK.sub(lambda e: _BREAKS.get(e[0], e[0]), string[0]), source
    )
    return calls if calls or unbroken == source else _calls_of(unbroken, tools, spelled)


def _calls_of(source: str, tools: RequestTools, spelled: dict[str, str]) -> list[tuple[str, str]]:
    try:
        with warnings.catch_warnings():  # of escapes that Python does not know
            warnings.simplefilter("ignore")
            return [
                _python_call(node, tools, spelled)
                for value in (getattr(line, "value", None) for line in ast.parse(source).body)
                for node in (value.elts if isinstance(value, ast.List | ast.Tuple) else [value])
            ]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        log.debug("code does not parse: %s", type(error).__name__)
        return []


def _with_calls_of(written: str, name: str, text: str) -> str:
    """Return `text` in which calls of `name` are calls of `written`.

    No pattern is made of the name: Python keeps patterns, for whoever names a tool so next.
    """
    parts, done = [], 0
    at = text.find(name) if name else -1
    while at >= 0:
        end = at + len(name)
        if _IN_A_NAME.match(text[at - 1 : at]) is None and _OPENED.match(text, end):
            parts += [text[done:at], written]
            done = end
        at = text.find(name, max(done, at + 1))
    return "".join([*parts, text[done:]])


def _python_call(node: Any, tools: RequestTools, spelled: dict[str, str]) -> tuple[str, str]:
    """Return the call that an expression is. Raises ValueError where it is none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        (node,) = node.args
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    called = ast.unparse(node.func)
    names = (called, called.removesuffix(".call"), called.rpartition(".")[2])
    name = next(filter(None, (tools.known(spelled.get(each, each)) for each in names)), "")
    if not name:
        raise ValueError("no tool")
    arguments = dict(zip(tools.arguments(name), map(_literal, node.args), strict=False))
    if len(arguments) < len(node.args):
        raise ValueError("more arguments than the tool has")
    for each in node.keywords:
        value = _literal(each.value)
        arguments |= value if each.arg is None else {each.arg: value}
    text = json.dumps(arguments, default=str, allow_nan=False)
    for written, meant in spelled.items():
        text = text.replace(written, meant)
    return name, json.dumps(json.loads(text), ensure_ascii=False)


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonWords().visit(node))


class _JsonWords(ast.NodeTransformer):
    """Takes JSON's words for Python's: templates show nested values as JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node

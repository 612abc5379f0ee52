"""Runs mlx-lm's and mlx-vlm's parsers of tool calls, and Python's, on any text without raising."""

import ast
import importlib
import json
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from hearth.shared.optional_packages import VISION_REMEDY, has_vision
from hearth.worker.stream.answer_parts import ToolCall, object_or_text
from hearth.worker.stream.tool_calls.request_tools import RequestTools

log = logging.getLogger(__name__)

UpstreamParser = Callable[[str, Any], Any]
failures: Counter[str] = Counter()  # of parsers since the start, by the name of what they raised
PYTHON_CHARS_MAX: Final = 400_000  # of source that is parsed at once
# mlx-vlm's parsers of formats that mlx-lm has none for, by what their templates write.
_OF_MLX_VLM: Final = {
    "<|START_ACTION|>": "mlx_vlm.tools.parsers.cohere2_moe",
    "]<]minimax[>[<tool_call>": "mlx_vlm.tools.parsers.minimax_m3",
}


def of_mlx_vlm(template: str) -> Any:
    """Return mlx-vlm's module for a template that mlx-lm has no parser for, None without one.

    Importing it takes seconds, as it brings all of mlx-vlm. Without mlx-vlm, which is said in the
    log, such a model's calls stay text.
    """
    module = next((name for mark, name in _OF_MLX_VLM.items() if mark in template), None)
    if module is None:
        return None
    if not has_vision():
        log.warning("tool calls stay text: to have this model's read, %s", VISION_REMEDY)
        return None
    return importlib.import_module(module)


def of_mlx_lm(name: str) -> UpstreamParser:
    """Return the parser of mlx-lm's module `name`."""
    parser: UpstreamParser = importlib.import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call
    return parser


def calls_in(parser: UpstreamParser, text: str, tools: RequestTools) -> list[ToolCall]:
    """Return the calls that `parser` finds in `text`, none if it is no call."""
    try:
        rows = parser(text, tools.rows or None)
        return [_call(row) for row in (rows if isinstance(rows, list) else [rows])]
    except Exception as error:  # upstream's parsers raise IndexError, RecursionError and more
        failures[type(error).__name__] += 1
        log.debug("tool call does not parse: %s", type(error).__name__)
        return []


def _call(row: Any) -> ToolCall:
    """Return the call in what a parser found. Raises ValueError where it is none."""
    if not isinstance(row, dict) or not isinstance(row.get("name"), str) or not row["name"].strip():
        raise ValueError("a call has a name")
    value = row.get("arguments")
    if isinstance(value, str):
        arguments = object_or_text(value or "{}")
    elif isinstance(value, dict):
        # Parsers that read Python literals also give tuples, sets and bytes.
        arguments = json.loads(json.dumps(value, default=str, allow_nan=False))
    else:
        raise ValueError("arguments are an object")
    return ToolCall(row["name"].strip(), arguments)


def python_calls(text: str, tools: RequestTools) -> list[ToolCall]:
    """Return the calls of tools that Python source consists of, none if it has anything else.

    `print(...)` around a call, a module in front of it and a variable for its result are left out.
    """
    if len(text) > PYTHON_CHARS_MAX:
        return []
    source, spelled = _with_python_names(text.strip(), tools)
    try:
        with warnings.catch_warnings():  # of escapes that Python does not know
            warnings.simplefilter("ignore")
            return [
                _python_call(node, tools, spelled)
                for line in ast.parse(source).body
                for node in _expressions(getattr(line, "value", None))
            ]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        failures[type(error).__name__] += 1
        log.debug("code does not parse: %s", type(error).__name__)
        return []


def _with_python_names(text: str, tools: RequestTools) -> tuple[str, dict[str, str]]:
    """Return source in which all tools have names that Python takes, and what these stand for."""
    spelled = {f"_tool_{n}_": name for n, name in enumerate(tools.names) if not name.isidentifier()}
    for written, name in spelled.items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?=\s*\()", written, text)
    return text, spelled


def _expressions(node: Any) -> list[ast.expr]:
    if isinstance(node, ast.List | ast.Tuple):
        return node.elts
    return [node]


def _python_call(node: Any, tools: RequestTools, spelled: dict[str, str]) -> ToolCall:
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
    plain: dict[str, Any] = json.loads(text)
    return ToolCall(name, plain)


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonWords().visit(node))


class _JsonWords(ast.NodeTransformer):
    """Takes JSON's words for Python's: templates show nested values as JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node

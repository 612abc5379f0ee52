"""Runs mlx-lm's and mlx-vlm's parsers of tool calls on any text without raising."""

import importlib
import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from hearth.shared.optional_packages import VISION_REMEDY, has_vision
from hearth.worker.stream.answer_parts import ToolCall, object_or_text
from hearth.worker.stream.tool_calls.request_tools import RequestTools

log = logging.getLogger(__name__)

UpstreamParser = Callable[[str, Any], Any]
failures: Counter[str] = Counter()  # of parsers since the start, by the name of what they raised
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

"""Cuts captured sessions short, so that a small model plays them in little time."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from hearth.commands.replay.traces import Body, Captured

ROOTS: Final = ("system", "instructions", "messages", "input", "tools")  # what a prompt is made of


def shortened(rows: Sequence[Captured], chars: int, tools: int = 4) -> list[Captured]:
    """Return the session with all long texts cut to some `chars`, the same text always alike.

    Of the tools stay the first few, and those that somebody calls or loads.
    """
    named = {value for row in rows for value in _called(row.body)}
    return [
        replace(
            row,
            body=_short_body(row.body, chars, tools, named),
            response=_short(row.response, chars),
        )
        for row in rows
    ]


def _short_body(body: Body, chars: int, tools: int, named: set[str]) -> Body:
    short = body | {root: _short(body[root], chars) for root in ROOTS if root in body}
    if "tools" in body:
        short["tools"] = [
            tool
            for number, tool in enumerate(short["tools"])
            if number < tools or (tool.get("function") or tool).get("name") in named
        ]
    return short


def _called(value: Any) -> Iterator[str]:
    """Yield the names of tools in calls and references."""
    if isinstance(value, list):
        for inner in value:
            yield from _called(inner)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in ("messages", "input", "content", "tool_calls", "function"):
                yield from _called(inner)
            elif key in ("name", "tool_name") and isinstance(inner, str):
                yield inner


def _short(value: Any, chars: int) -> Any:
    if isinstance(value, dict):
        return {key: _short(inner, chars) for key, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner, chars) for inner in value]
    if not isinstance(value, str) or len(value) <= chars:
        return value
    if value.startswith("{"):
        return _short_json(value, chars)
    half = chars // 2
    return value[:half] + "\n[...]\n" + value[-half:]


def _short_json(value: str, chars: int) -> str:
    try:
        return json.dumps(_short(json.loads(value), chars), ensure_ascii=False)
    except ValueError:
        return value[:chars]

"""Shows deferred tools to the model where they are loaded, not at the prompt's head.

A client that loads a tool in mid-conversation lists it from then on. Rendered at the head, it
would change the prompt before the first message; where its reference stands, it is appended.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any


def with_loaded_tools(
    messages: list[dict[str, Any]], deferred: list[Any], loaded: Iterable[str]
) -> list[dict[str, Any]]:
    """Return the messages with each referenced tool's definition behind its reference.

    `loaded` names the tools that the session loaded. Those still listed whose reference is gone,
    as after a compaction, stand behind the first user message. Messages are not modified.
    """
    if not deferred:
        return messages
    known = {tool["function"]["name"]: tool for tool in deferred}
    shown: set[str] = set()
    placed = []
    for message in messages:
        names = [name for name in message.get("tool_references") or () if name in known]
        shown.update(names)
        placed.append(_with_tools(message, names, known))
    missing = [name for name in loaded if name in known and name not in shown]
    for at, message in enumerate(placed):
        if missing and message["role"] == "user":
            placed[at] = _with_tools(message, missing, known)
            break
    assert len(placed) == len(messages), (len(placed), len(messages))
    return placed


def _with_tools(
    message: dict[str, Any], names: list[str], known: Mapping[str, Any]
) -> dict[str, Any]:
    if not names:
        return message
    lines = [json.dumps(known[name], ensure_ascii=False) for name in names]
    block = "\n".join(["These tools are available from now on:", "<tools>", *lines, "</tools>"])
    content = message.get("content") or ""
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": f"\n{block}"}]}
    return {**message, "content": f"{content}\n{block}" if content else block}

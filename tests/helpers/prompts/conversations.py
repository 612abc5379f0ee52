"""Holds the conversations of docs/prompts.md, as chat and in the words of the other dialects.

A dialect's body is written as its own clients write it, and read by the proxy's own parser.
"""

import copy
import json
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from hearth.proxy.api.dialects import DIALECTS as API_DIALECTS

Body = dict[str, Any]

DATA: Final = Path(__file__).parents[2] / "data" / "prompts"
_KEPT: Final = json.loads((DATA / "conversations.json").read_text())
IN_DIALECTS: Final[list[str]] = _KEPT["in_dialects"]  # those that all dialects can say


def _chat(row: Body) -> Body:
    """Return the body of a kept row: it names its tools, and may name a row with its messages."""
    messages = row["messages"]
    if isinstance(messages, str):
        messages = _chat(_KEPT["conversations"][messages])["messages"]
    tools = {"tools": [_KEPT["tools"][name] for name in row["tools"]]} if "tools" in row else {}
    return {**row, "messages": messages, **tools}


CONVERSATIONS: Final[dict[str, Body]] = {
    name: _chat(row) for name, row in _KEPT["conversations"].items()
}


def prompt_of(dialect: str, body: Body) -> Any:
    """Return what the proxy makes of a chat body in the words of that dialect."""
    write, parse = DIALECTS[dialect]
    return parse({"model": "m", **write(copy.deepcopy(body))}).prompt


def _thoughts(message: Body) -> list[str]:
    return [message["reasoning_content"]] if message.get("reasoning_content") else []


def _calls(message: Body) -> list[tuple[str, str, Any]]:
    """Return the id, the name and the arguments of each call."""
    calls = ((call["id"], call["function"]) for call in message.get("tool_calls", ()))
    return [(call_id, each["name"], json.loads(each["arguments"])) for call_id, each in calls]


def _messages(body: Body) -> Body:
    """Return a body of Anthropic's Messages: results of one turn are one message of the user's."""
    effort, has_system = body.get("reasoning_effort"), body["messages"][0]["role"] == "system"
    said = groupby(body["messages"][has_system:], lambda message: message["role"] == "tool")
    asked = {"thinking": {"type": "adaptive"}, "output_config": {"effort": effort}}
    return {
        "max_tokens": 100,
        "system": body["messages"][0]["content"] if has_system else None,
        "messages": [
            each
            for is_result, group in said
            for each in (
                [{"role": "user", "content": [block for m in group for block in _blocks(m)]}]
                if is_result
                else [{"role": m["role"], "content": _blocks(m)} for m in group]
            )
        ],
        "tools": [
            {"input_schema": tool["function"].pop("parameters"), **tool["function"]}
            for tool in body.get("tools", ())
        ],
        **({"thinking": {"type": "disabled"}} if effort == "none" else asked if effort else {}),
    }


def _blocks(message: Body) -> list[Body]:
    said = message["content"]
    if message["role"] == "tool":
        found = {"tool_use_id": message["tool_call_id"], "content": said}
        return [{"type": "tool_result", **found}]
    return [
        *(
            {"type": "thinking", "thinking": each, "signature": "c2c"}
            for each in _thoughts(message)
        ),
        *({"type": "text", "text": text} for text in [said] if text),
        *(
            {"type": "tool_use", "id": call_id, "name": name, "input": given}
            for call_id, name, given in _calls(message)
        ),
    ]


def _responses(body: Body) -> Body:
    """Return a body of OpenAI's Responses: what a turn thought, said and called are its items."""
    effort, has_system = body.get("reasoning_effort"), body["messages"][0]["role"] == "system"
    return {
        "instructions": body["messages"][0]["content"] if has_system else None,
        "input": [item for each in body["messages"][has_system:] for item in _items(each)],
        "tools": [{"type": "function", **tool["function"]} for tool in body.get("tools", ())],
        **({"reasoning": {"effort": effort}} if effort else {}),
    }


def _items(message: Body) -> list[Body]:
    role, said = message["role"], message["content"]
    kind = "output_text" if role == "assistant" else "input_text"
    if role == "tool":
        found = {"call_id": message["tool_call_id"], "output": said}
        return [{"type": "function_call_output", **found}]
    return [
        *(
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": t}]}
            for t in _thoughts(message)
        ),
        *({"role": role, "content": [{"type": kind, "text": text}]} for text in [said] if text),
        *(
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls", ())
        ),
    ]


def _ollama(body: Body) -> Body:
    """Return a body of Ollama's chat: results name their tool, arguments are objects."""
    names = {call[0]: call[1] for each in body["messages"] for call in _calls(each)}
    effort = body.get("reasoning_effort")
    return {
        "messages": [
            {
                "role": each["role"],
                "content": each["content"] or "",
                **dict.fromkeys(["thinking"] * bool(_thoughts(each)), *_thoughts(each)),
                "tool_calls": [
                    {"id": call_id, "function": {"name": name, "arguments": given}}
                    for call_id, name, given in _calls(each)
                ],
                "tool_call_id": each.get("tool_call_id"),
                "tool_name": names.get(each.get("tool_call_id")),
            }
            for each in body["messages"]
        ],
        "tools": body.get("tools"),
        "think": False if effort == "none" else effort,
    }


DIALECTS: Final[dict[str, Any]] = {  # how a body is written, and how it is read
    "chat": (dict, API_DIALECTS["chat"].parse),
    "Messages": (_messages, API_DIALECTS["messages"].parse),
    "Responses": (_responses, API_DIALECTS["responses"].parse),
    "Ollama": (_ollama, API_DIALECTS["ollama_chat"].parse),
}

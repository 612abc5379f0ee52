"""Holds the conversations of docs/prompts.md, as chat and in the words of the other dialects.

A dialect's body is written as its own clients write it, and read by the proxy's own parser.
"""

import copy
import json
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from hearth.proxy.api import chat_completions
from hearth.proxy.api.messages import messages_request
from hearth.proxy.api.ollama import ollama_request
from hearth.proxy.api.responses import responses_request

Body = dict[str, Any]

DATA: Final = Path(__file__).parents[2] / "data" / "prompts"
_KEPT: Final = json.loads((DATA / "conversations.json").read_text())
IN_DIALECTS: Final[list[str]] = _KEPT["in_dialects"]  # those that all dialects can say
SIGNATURE: Final = "c2lnbmVk"  # another server's, of its thinking


def _chat(row: Body) -> Body:
    """Return the body of a kept row: it names its tools, and may name a row with its messages."""
    messages = row["messages"]
    while isinstance(messages, str):
        messages = _KEPT["conversations"][messages]["messages"]
    tools = {"tools": [_KEPT["tools"][name] for name in row["tools"]]} if "tools" in row else {}
    return {**row, "messages": messages, **tools}


CONVERSATIONS: Final[dict[str, Body]] = {
    name: _chat(row) for name, row in _KEPT["conversations"].items()
}


def prompt_of(dialect: str, body: Body) -> Any:
    """Return what the proxy makes of a chat body in the words of that dialect."""
    write, parse = DIALECTS[dialect]
    return parse({"model": "m", **write(copy.deepcopy(body))}).prompt


def _parted(messages: list[Body]) -> tuple[str | None, list[Body]]:
    """Return what the first message says where it is the system's, and the others."""
    if messages[0]["role"] != "system":
        return None, messages
    return messages[0]["content"], messages[1:]


def _functions(message: Body) -> Iterator[tuple[str, Body]]:
    """Yield the id and the function of each call."""
    for call in message.get("tool_calls", ()):
        yield call["id"], call["function"]


# ---------------------------------------------------------------- Anthropic's Messages


def _messages(body: Body) -> Body:
    system, said = _parted(body["messages"])
    turns: list[Body] = []
    for is_result, group in groupby(said, lambda message: message["role"] == "tool"):
        if is_result:
            turns.append({"role": "user", "content": list(map(_tool_result, group))})
        else:
            turns += ({**each, "content": _blocks(each)} for each in group)
    effort = body.get("reasoning_effort")
    switches: Body = {"thinking": {"type": "disabled"}} if effort == "none" else {}
    if effort and not switches:
        switches = {"thinking": {"type": "adaptive"}, "output_config": {"effort": effort}}
    tools = [
        {**tool["function"], "input_schema": tool["function"].pop("parameters")}
        for tool in body.get("tools", ())
    ]
    turns = [{name: turn[name] for name in ("role", "content")} for turn in turns]
    return {"max_tokens": 100, "system": system, "messages": turns, "tools": tools, **switches}


def _tool_result(message: Body) -> Body:
    found = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
    return {"type": "tool_result", **found}


def _blocks(message: Body) -> Any:
    if message["role"] != "assistant":
        return message["content"]
    blocks = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": SIGNATURE})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call_id, function in _functions(message):
        given = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call_id, "name": function["name"], "input": given})
    return blocks


# ---------------------------------------------------------------- OpenAI's Responses


def _responses(body: Body) -> Body:
    instructions, said = _parted(body["messages"])
    effort = body.get("reasoning_effort")
    tools = [{"type": "function", **tool["function"]} for tool in body.get("tools", ())]
    switches = {"reasoning": {"effort": effort}} if effort else {}
    items = [item for message in said for item in _items(message)]
    return {"instructions": instructions, "input": items, "tools": tools, **switches}


def _items(message: Body) -> Iterator[Body]:
    role, content = message["role"], message["content"]
    if role == "tool":
        found = {"call_id": message["tool_call_id"], "output": content}
        yield {"type": "function_call_output", **found}
        return
    if thought := message.get("reasoning_content"):
        told = [{"type": "reasoning_text", "text": thought}]
        yield {"type": "reasoning", "id": "rs_1", "summary": [], "content": told}
    if content or role != "assistant":
        kind = "output_text" if role == "assistant" else "input_text"
        yield {"type": "message", "role": role, "content": [{"type": kind, "text": content}]}
    for call_id, function in _functions(message):
        yield {"type": "function_call", "call_id": call_id, **function}


# ---------------------------------------------------------------- Ollama's chat


def _ollama(body: Body) -> Body:
    effort = body.get("reasoning_effort")
    names: dict[str, str] = {}
    rows = []
    for message in body["messages"]:
        row = {"role": message["role"], "content": message["content"] or ""}
        if thought := message.get("reasoning_content"):
            row["thinking"] = thought
        calls = []
        for call_id, function in _functions(message):
            names[call_id] = function["name"]
            given = json.loads(function["arguments"])
            calls.append({"id": call_id, "function": {**function, "arguments": given}})
        if calls:
            row["tool_calls"] = calls
        if call_id := message.get("tool_call_id"):
            row |= {"tool_call_id": call_id, "tool_name": names[call_id]}
        rows.append(row)
    switches = {"think": False if effort == "none" else effort} if effort else {}
    return {"messages": rows, "tools": body.get("tools"), **switches}


DIALECTS: Final[dict[str, tuple[Callable[[Body], Body], Callable[[Body], Any]]]] = {
    "chat": (lambda body: body, chat_completions.parse),
    "Messages": (_messages, messages_request.parse),
    "Responses": (_responses, responses_request.parse),
    "Ollama": (_ollama, ollama_request.parse_chat),
}

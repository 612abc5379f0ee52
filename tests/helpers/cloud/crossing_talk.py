"""Leads one conversation in one dialect, with another model a turn, and sends back what came.

What comes is sent back whole, as clients do that know nothing of who answered.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.helpers.cloud.dialect_requests import DialectAnswer, ask

SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
BUDGET: Final = {"type": "enabled", "budget_tokens": 1024}
Row = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One answer."""

    text: str
    thinking: str
    calls: list[tuple[str, str]]  # id, name
    cached: int
    prompt: int
    answer: DialectAnswer


class CrossingTalk:
    """A conversation; `history` is what the next request sends, but for what an id stands for."""

    def __init__(self, url: str, dialect: str, *, by_id: bool = False) -> None:
        self.url = url
        self.dialect = dialect
        self.by_id = by_id
        self.history: list[Row] = []
        self.previous: str | None = None

    def user(self, text: str) -> "CrossingTalk":
        self.history.append({"role": "user", "content": text})
        return self

    def result(self, call_id: str, text: str) -> "CrossingTalk":
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        rows: dict[str, Row] = {
            "chat": {"role": "tool", "tool_call_id": call_id, "content": text},
            "responses": {"type": "function_call_output", "call_id": call_id, "output": text},
            "messages": {"role": "user", "content": [block]},
        }
        self.history.append(rows[self.dialect])
        return self

    def ask(self, model: str, *, stream: bool = False) -> Turn:
        answer = ask(self.url, self.dialect, self._body(model, stream))
        assert answer.status == 200, answer.raw
        assert not answer.error, answer.raw
        whole = self._merged(answer.rows) if stream else answer.rows[0]
        turn = getattr(self, f"take_{self.dialect}")(whole, answer)
        assert isinstance(turn, Turn)
        return turn

    def _body(self, model: str, stream: bool) -> Row:
        more = {"stream": True} if stream else {}
        rows = list(self.history)
        if self.dialect == "chat":
            told = {"stream_options": {"include_usage": True}} if stream else {}
            tool: Row = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
            return {"model": model, "messages": rows, "tools": [tool], **told, **more}
        if self.dialect == "messages":
            tool = {"name": "weather", "input_schema": SCHEMA}
            rest = {"max_tokens": 4000, "thinking": BUDGET, "tools": [tool]}
            return {"model": model, "messages": rows, **rest, **more}
        tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
        rest = {"include": ["reasoning.encrypted_content"], "tools": [tool]}
        rest |= {"reasoning": {"effort": "medium"}, "store": self.by_id}
        if self.by_id and self.previous is not None:
            rest["previous_response_id"] = self.previous
        return {"model": model, "input": rows, **rest, **more}

    # ------------------------------------------------------------ taking up what came

    def take_chat(self, whole: Row, answer: DialectAnswer) -> Turn:
        message = whole["choices"][0]["message"]
        self.history.append(message)
        calls = [(row["id"], row["function"]["name"]) for row in message.get("tool_calls") or ()]
        prompt, cached, _ = answer.usage
        thinking = message.get("reasoning_content") or ""
        return Turn(message.get("content") or "", thinking, calls, cached, prompt, answer)

    def take_messages(self, whole: Row, answer: DialectAnswer) -> Turn:
        blocks = whole["content"]
        self.history.append({"role": "assistant", "content": blocks})
        prompt, cached, _ = answer.usage
        return Turn(
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            [(block["id"], block["name"]) for block in blocks if block["type"] == "tool_use"],
            cached,
            prompt,
            answer,
        )

    def take_responses(self, whole: Row, answer: DialectAnswer) -> Turn:
        items = whole["output"]
        if self.by_id:
            self.previous = whole["id"]
            self.history.clear()
        else:
            self.history += items
        parts = [part for row in items if row["type"] == "message" for part in row["content"]]
        thoughts = [row for row in items if row["type"] == "reasoning"]
        told = [part for row in thoughts for part in row.get("content") or row["summary"]]
        prompt, cached, _ = answer.usage
        return Turn(
            "".join(part["text"] for part in parts),
            "".join(part["text"] for part in told),
            [(row["call_id"], row["name"]) for row in items if row["type"] == "function_call"],
            cached,
            prompt,
            answer,
        )

    # ------------------------------------------------------------ streams

    def _merged(self, rows: list[Row]) -> Row:
        if self.dialect == "responses":
            (last,) = (row["response"] for row in rows if row["type"] == "response.completed")
            return dict(last)
        return _merged_chat(rows) if self.dialect == "chat" else _merged_messages(rows)


def _merged_chat(rows: list[Row]) -> Row:
    message: Row = {"role": "assistant", "content": ""}
    calls: dict[int, Row] = {}
    for delta in (choice["delta"] for row in rows for choice in row["choices"]):
        message["content"] += delta.get("content") or ""
        if delta.get("reasoning_content"):
            before = message.get("reasoning_content", "")
            message["reasoning_content"] = before + delta["reasoning_content"]
        for piece in delta.get("tool_calls") or ():
            call = calls.get(piece["index"]) or _empty_call(piece)
            calls[piece["index"]] = call
            call["function"]["arguments"] += piece["function"].get("arguments") or ""
    if calls:
        message["tool_calls"] = list(calls.values())
    return {"choices": [{"message": message}]}


def _empty_call(piece: Mapping[str, Any]) -> Row:
    function = {"name": piece["function"]["name"], "arguments": ""}
    return {"id": piece["id"], "type": "function", "function": function}


def _merged_messages(rows: list[Row]) -> Row:
    blocks: dict[int, Row] = {}
    inputs: dict[int, str] = {}
    fields = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    for row in rows:
        if row["type"] == "content_block_start":
            blocks[row["index"]] = dict(row["content_block"])
        elif row["type"] == "content_block_delta":
            delta, index = row["delta"], row["index"]
            if name := fields.get(delta["type"]):
                blocks[index][name] = (blocks[index].get(name) or "") + delta[name]
            elif delta["type"] == "input_json_delta":
                inputs[index] = inputs.get(index, "") + delta["partial_json"]
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text or "{}")
    return {"content": [blocks[index] for index in sorted(blocks)]}

"""Writes answers as the providers do in each dialect, whole and as streams."""

import base64
import hashlib
import json
import re
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.helpers.cloud.cloud_answers import (
    CloudAnswer,
    CloudMemory,
    CloudUsage,
    Row,
    new_id,
    tokens,
)

# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class Reply:
    """One answer in both forms; the request says which is sent."""

    whole: Row
    events: list[bytes]
    usage: CloudUsage


def _pieces(text: str) -> list[str]:
    """Return `text` in words, each with the white space behind it."""
    return re.findall(r"\S+\s*|\s+", text)


def data(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def event(value: Row) -> bytes:
    return f"event: {value['type']}\n".encode() + data(value)


def _chat_usage(usage: CloudUsage) -> Row:
    total = usage.prompt + usage.completion
    told = {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
    details = {"cached_tokens": usage.cached}
    return {**told, "total_tokens": total, "prompt_tokens_details": details}


def _streamed(
    body: Row, base: Row, usage: CloudUsage, choices: Iterable[Row], finish: str
) -> list[bytes]:
    events = [data({**base, "choices": [{"index": 0, **row}]}) for row in choices]
    last = {"index": 0, "delta": {}, "text": "", "finish_reason": finish}
    events.append(data({**base, "choices": [last]}))
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(data({**base, "choices": [], "usage": _chat_usage(usage)}))
    return [*events, b"data: [DONE]\n\n"]


def _chat(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    usage = memory.usage(body["model"], [body.get("tools"), *body["messages"]], answer)
    base = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": body["model"]}
    calls: list[Row] = [
        {"id": new_id("call_"), "type": "function"}
        | {"function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))}}
        for call in answer.calls
    ]
    message: Row = {"role": "assistant", "content": answer.text or None, "refusal": None}
    message |= {"annotations": [], **({"tool_calls": calls} if calls else {})}
    deltas: list[Row] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in _pieces(answer.text)]
    for at, call in enumerate(calls):
        pieces = _pieces(call["function"]["arguments"])
        bare = {"name": call["function"]["name"], "arguments": ""}
        deltas.append({"tool_calls": [call | {"index": at, "function": bare}]})
        tails = [{"index": at, "function": {"arguments": piece}} for piece in pieces]
        deltas += [{"tool_calls": [tail]} for tail in tails]
    finish = "tool_calls" if calls else "stop"
    choice: Row = {"index": 0, "message": message, "finish_reason": finish}
    if body.get("logprobs"):
        row: Row = {"logprob": -0.5, "bytes": None, "top_logprobs": []}
        choice["logprobs"] = {"content": [{"token": each, **row} for each in _pieces(answer.text)]}
    whole = {**base, "object": "chat.completion", "choices": [choice], "usage": _chat_usage(usage)}
    base |= {"object": "chat.completion.chunk"}
    choices = ({"delta": delta, "finish_reason": None} for delta in deltas)
    return Reply(whole, _streamed(body, base, usage, choices, finish), usage)


def _completions(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    usage = memory.usage(body["model"], [body["prompt"]], answer)
    base = {"id": new_id("cmpl-"), "object": "text_completion", "model": body["model"]}
    base["created"] = int(time.time())
    choice = {"index": 0, "text": answer.text, "finish_reason": "stop", "logprobs": None}
    choices = [{"text": piece, "finish_reason": None} for piece in _pieces(answer.text)]
    whole = {**base, "choices": [choice], "usage": _chat_usage(usage)}
    return Reply(whole, _streamed(body, base, usage, choices, "stop"), usage)


def embedding(text: str) -> list[float]:
    """Return a vector that is the same for the same text; its numbers are exact in float32."""
    return [byte / 256 for byte in hashlib.shake_128(text.encode()).digest(8)]


def _embeddings(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    given = body["input"]
    texts = [given] if isinstance(given, str) else given
    rows: list[Any] = [embedding(text) for text in texts]
    if body.get("encoding_format") == "base64":
        rows = [base64.b64encode(struct.pack("<8f", *row)).decode() for row in rows]
    told = [{"object": "embedding", "index": at, "embedding": row} for at, row in enumerate(rows)]
    usage = {"prompt_tokens": sum(map(tokens, texts)), "total_tokens": sum(map(tokens, texts))}
    whole = {"object": "list", "data": told, "model": body["model"], "usage": usage}
    return Reply(whole, [], CloudUsage(usage["prompt_tokens"], 0, 0))


def units(body: Row) -> list[Any]:
    return [body.get("tools"), body.get("system"), *body["messages"]]


def _messages(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    usage = memory.usage(body["model"], units(body), answer)
    if "cache_control" not in json.dumps(body):  # nothing is kept unasked
        usage = CloudUsage(usage.prompt, 0, usage.completion)
    blocks: list[Row] = []
    if answer.thinking:
        signature = memory.sealed(answer.thinking)
        blocks.append({"type": "thinking", "thinking": answer.thinking, "signature": signature})
    if answer.redacted:
        blocks.append({"type": "redacted_thinking", "data": memory.sealed(answer.redacted)})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    head = {"type": "tool_use"}
    blocks += [
        {**head, "id": new_id("toolu_01"), "name": call.name, "input": dict(call.arguments)}
        for call in answer.calls
    ]
    told = {"input_tokens": usage.prompt - usage.cached, "cache_read_input_tokens": usage.cached}
    told |= {"cache_creation_input_tokens": 0, "output_tokens": usage.completion}
    stop = {"stop_reason": "tool_use" if answer.calls else "end_turn", "stop_sequence": None}
    whole: Row = {"id": new_id("msg_01"), "type": "message", "role": "assistant"}
    whole |= {"model": body["model"], "content": blocks, **stop, "usage": told}
    begun = {**whole, "content": [], "stop_reason": None}
    rows: list[Row] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(blocks):
        empty: dict[str, Row] = {"text": {"text": ""}, "tool_use": {"input": {}}}
        empty["thinking"] = {"thinking": "", "signature": ""}
        opened = {**block, **empty.get(block["type"], {})}
        rows.append({"type": "content_block_start", "index": index, "content_block": opened})
        deltas = ({"index": index, "delta": delta} for delta in _deltas(block))
        rows += [{"type": "content_block_delta", **delta} for delta in deltas]
        rows.append({"type": "content_block_stop", "index": index})
    rows += [{"type": "message_delta", "delta": stop, "usage": told}, {"type": "message_stop"}]
    return Reply(whole, list(map(event, rows)), usage)


def _deltas(block: Row) -> Iterator[Row]:
    for name in ("thinking", "text", "input"):
        if (told := block.get(name)) is not None:
            kind, field_name = ("input_json", "partial_json") if name == "input" else (name, name)
            for piece in _pieces(json.dumps(told) if name == "input" else told):
                yield {"type": f"{kind}_delta", field_name: piece}
    if "signature" in block:
        yield {"type": "signature_delta", "signature": block["signature"]}


def _responses(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    given = body["input"]
    rows = [{"role": "user", "content": given}] if isinstance(given, str) else given
    items = [*memory.responses.get(body.get("previous_response_id") or "", ()), *rows]
    bare = [{k: v for k, v in row.items() if k not in ("id", "status", "type")} for row in items]
    units = [body.get("instructions"), body.get("tools"), *bare]
    usage = memory.usage(body["model"], units, answer)
    output = _output(body, answer, memory)
    is_stored = body.get("store") is not False
    needs = next((item["id"] for item in output if item["type"] == "reasoning"), None)
    for item in output:
        memory.items[item["id"]] = (is_stored, None if item["type"] == "reasoning" else needs)
    told = {"input_tokens": usage.prompt, "output_tokens": usage.completion}
    told["total_tokens"] = usage.prompt + usage.completion
    details = {"input_tokens_details": {"cached_tokens": usage.cached}}
    details["output_tokens_details"] = {"reasoning_tokens": tokens(answer.thinking)}
    whole: Row = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time())}
    whole |= {"model": body["model"], "status": "completed", "error": None, "output": output}
    whole |= {"incomplete_details": None, "instructions": None, "metadata": {}, "tools": []}
    whole |= {"parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0, "tool_choice": "auto"}
    whole |= {"previous_response_id": body.get("previous_response_id"), "store": is_stored}
    whole |= {"usage": {**told, **details}}
    if is_stored:
        memory.responses[whole["id"]] = [*items, *output]
    begun = {"response": {**whole, "status": "in_progress", "output": [], "usage": None}}
    events = [{"type": f"response.{name}", **begun} for name in ("created", "in_progress")]
    for at, item in enumerate(output):
        events += _item_events(at, item)
    events.append({"type": "response.completed", "response": whole})
    numbered = [row | {"sequence_number": number} for number, row in enumerate(events)]
    return Reply(whole, list(map(event, numbered)), usage)


def _output(body: Row, answer: CloudAnswer, memory: CloudMemory) -> list[Row]:
    items: list[Row] = []
    if answer.thinking:
        summary = [{"type": "summary_text", "text": answer.thinking}]
        items.append({"type": "reasoning", "id": new_id("rs_"), "summary": summary})
        if "reasoning.encrypted_content" in (body.get("include") or ()):
            items[-1]["encrypted_content"] = memory.sealed(answer.thinking)
    if answer.text:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": new_id("msg_"), "status": "completed"}
        items.append({**head, "role": "assistant", "content": [part]})
    for call in answer.calls:
        told = {"call_id": new_id("call_"), "name": call.name, "status": "completed"}
        text = json.dumps(dict(call.arguments))
        items.append({"type": "function_call", "id": new_id("fc_"), **told, "arguments": text})
    return items


def _item_events(at: int, item: Row) -> Iterator[Row]:
    place = {"output_index": at, "item_id": item["id"]}
    begun = {"content": [], "summary": [], "arguments": ""}
    added = {name: begun.get(name, each) for name, each in item.items()}
    yield {"type": "response.output_item.added", "output_index": at, "item": added}
    if item["type"] == "function_call":
        name, text, part = "function_call_arguments", item["arguments"], None
    elif item["type"] == "reasoning":
        name, part = "reasoning_summary", item["summary"][0]
        text, place["summary_index"] = part["text"], 0
    else:
        name, part = "content", item["content"][0]
        text, place["content_index"] = part["text"], 0
    kind = {"content": "output_text", "reasoning_summary": "reasoning_summary_text"}.get(name, name)
    if part is not None:
        yield {"type": f"response.{name}_part.added", **place, "part": {**part, "text": ""}}
    for piece in _pieces(text):
        yield {"type": f"response.{kind}.delta", **place, "delta": piece, "logprobs": []}
    yield {"type": f"response.{kind}.done", **place, "text": text, "arguments": text}
    if part is not None:
        yield {"type": f"response.{name}_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": at, "item": item}


REPLIES: Final = {
    "chat": _chat,
    "completions": _completions,
    "embeddings": _embeddings,
    "messages": _messages,
    "responses": _responses,
}

"""Writes answers as the providers do in each dialect, whole and as streams."""

import base64
import hashlib
import json
import re
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from tests.helpers.cloud.cloud_answers import (
    CloudAnswer,
    CloudMemory,
    CloudUsage,
    Row,
    new_id,
    tokens,
)


class Reply(NamedTuple):
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


def _completion(
    body: Row, usage: CloudUsage, kind: str, choice: Row, deltas: Iterable[Row]
) -> Reply:
    """Return a reply of OpenAI's older dialects, whose choice is `choice` or comes as `deltas`."""
    base = {"id": new_id("cmpl-"), "created": int(time.time()), "model": body["model"]}
    told = {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
    told |= {"total_tokens": usage.prompt + usage.completion}
    spent = {"usage": told | {"prompt_tokens_details": {"cached_tokens": usage.cached}}}
    whole = {**base, "object": kind, "choices": [{"index": 0, **choice}], **spent}
    base["object"] = kind if kind == "text_completion" else f"{kind}.chunk"
    last = {"delta": {}, "text": "", "finish_reason": choice["finish_reason"]}
    rows = [{"index": 0, "finish_reason": None, **row} for row in (*deltas, last)]
    events = [data({**base, "choices": [row]}) for row in rows]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(data({**base, "choices": [], **spent}))
    return Reply(whole, [*events, b"data: [DONE]\n\n"], usage)


def _chat(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    usage = memory.usage(body["model"], [body.get("tools"), *body["messages"]], answer)
    calls: list[Row] = [
        {"id": new_id("call_"), "type": "function"}
        | {"function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in answer.calls
    ]
    deltas: list[Row] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in _pieces(answer.text)]
    for at, call in enumerate(calls):
        told = call["function"]
        parts = [{"arguments": piece} for piece in _pieces(told["arguments"])]
        begun = {"index": at, **call, "function": told | {"arguments": ""}}
        rows = [begun, *({"index": at, "function": part} for part in parts)]
        deltas += [{"tool_calls": [row]} for row in rows]
    message: Row = {"role": "assistant", "content": answer.text or None, "refusal": None}
    message |= {"annotations": [], **({"tool_calls": calls} if calls else {})}
    choice = {"message": message, "finish_reason": "tool_calls" if calls else "stop"}
    if body.get("logprobs"):
        row: Row = {"logprob": -0.5, "bytes": None, "top_logprobs": []}
        choice["logprobs"] = {"content": [{"token": each, **row} for each in _pieces(answer.text)]}
    return _completion(body, usage, "chat.completion", choice, ({"delta": row} for row in deltas))


def _completions(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    usage = memory.usage(body["model"], [body["prompt"]], answer)
    choice = {"text": answer.text, "finish_reason": "stop", "logprobs": None}
    pieces = ({"text": piece} for piece in _pieces(answer.text))
    return _completion(body, usage, "text_completion", choice, pieces)


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
        usage = usage._replace(cached=0)
    blocks: list[Row] = []
    if answer.thinking:
        signature = memory.sealed(answer.thinking)
        blocks.append({"type": "thinking", "thinking": answer.thinking, "signature": signature})
    if answer.redacted:
        blocks.append({"type": "redacted_thinking", "data": memory.sealed(answer.redacted)})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        block = {"type": "tool_use", "id": new_id("toolu_01"), "name": call.name}
        blocks.append({**block, "input": dict(call.arguments)})
    told = {"input_tokens": usage.prompt - usage.cached, "cache_read_input_tokens": usage.cached}
    told |= {"cache_creation_input_tokens": 0, "output_tokens": usage.completion}
    stop = {"stop_reason": "tool_use" if answer.calls else "end_turn", "stop_sequence": None}
    whole: Row = {"id": new_id("msg_01"), "type": "message", "role": "assistant"}
    whole |= {"model": body["model"], "content": blocks, **stop, "usage": told}
    begun = {**whole, "content": [], "stop_reason": None}
    rows: list[Row] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(blocks):
        empty: Row = {"text": "", "input": {}, "thinking": "", "signature": ""}
        opened = {name: empty.get(name, each) for name, each in block.items()}
        rows.append({"type": "content_block_start", "index": index, "content_block": opened})
        deltas = ({"index": index, "delta": delta} for delta in _deltas(block))
        rows += [{"type": "content_block_delta", **delta} for delta in deltas]
        rows.append({"type": "content_block_stop", "index": index})
    rows += [{"type": "message_delta", "delta": stop, "usage": told}, {"type": "message_stop"}]
    return Reply(whole, list(map(event, rows)), usage)


def _deltas(block: Row) -> Iterator[Row]:
    for name in block.keys() & {"thinking", "text"}:
        yield from ({"type": f"{name}_delta", name: piece} for piece in _pieces(block[name]))
    for piece in _pieces(json.dumps(block["input"])) if "input" in block else ():
        yield {"type": "input_json_delta", "partial_json": piece}
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
    told: Row = {"input_tokens": usage.prompt, "output_tokens": usage.completion}
    told |= {"total_tokens": usage.prompt + usage.completion}
    told |= {"input_tokens_details": {"cached_tokens": usage.cached}}
    told |= {"output_tokens_details": {"reasoning_tokens": tokens(answer.thinking)}}
    whole: Row = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time())}
    whole |= {"model": body["model"], "status": "completed", "error": None, "output": output}
    whole |= {"incomplete_details": None, "instructions": None, "metadata": {}, "tools": []}
    whole |= {"parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0, "tool_choice": "auto"}
    whole |= {"previous_response_id": body.get("previous_response_id"), "store": is_stored}
    whole |= {"usage": told}
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
        text = json.dumps(call.arguments)
        items.append({"type": "function_call", "id": new_id("fc_"), **told, "arguments": text})
    return items


# Of an item, the field that its text is a part of, and the names of its events.
_PARTS: Final = {
    "reasoning": ("summary", "reasoning_summary_part", "reasoning_summary_text"),
    "message": ("content", "content_part", "output_text"),
}


def _item_events(at: int, item: Row) -> Iterator[Row]:
    place = {"output_index": at, "item_id": item["id"]}
    begun: Row = {"content": [], "summary": [], "arguments": ""}
    added = {name: begun.get(name, each) for name, each in item.items()}
    yield {"type": "response.output_item.added", "output_index": at, "item": added}
    field, part_kind, kind = _PARTS.get(item["type"], ("", "", "function_call_arguments"))
    part = item[field][0] if field else {"text": item["arguments"]}
    if field:
        place[f"{field}_index"] = 0
        yield {"type": f"response.{part_kind}.added", **place, "part": {**part, "text": ""}}
    for piece in _pieces(part["text"]):
        yield {"type": f"response.{kind}.delta", **place, "delta": piece, "logprobs": []}
    done = {"text": part["text"], "arguments": part["text"]}
    yield {"type": f"response.{kind}.done", **place, **done}
    if field:
        yield {"type": f"response.{part_kind}.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": at, "item": item}


REPLIES: Final = {
    "chat": _chat,
    "completions": _completions,
    "embeddings": _embeddings,
    "messages": _messages,
    "responses": _responses,
}

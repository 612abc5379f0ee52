"""Writes answers as Anthropic's Messages does: signed thinking, blocks, a stream with pings."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tests.helpers.cloud.cloud_answers import CloudAnswer, CloudError, error_body
from tests.helpers.cloud.cloud_memory import CloudMemory, CloudUsage, new_id
from tests.helpers.cloud.openai_replies import CloudReply, pieces, written

Block = dict[str, Any]


def units_of(body: Mapping[str, Any]) -> list[Any]:
    return [body.get("tools"), body.get("system"), *body["messages"]]


def messages_reply(body: Mapping[str, Any], answer: CloudAnswer, memory: CloudMemory) -> CloudReply:
    usage = memory.usage(body["model"], units_of(body), written(answer), answer.thinking)
    if "cache_control" not in json.dumps(dict(body)):  # nothing is kept unasked
        usage = CloudUsage(usage.prompt, 0, usage.completion, usage.reasoning)
    finish = "tool_use" if answer.calls else "end_turn"
    finish = {"length": "max_tokens", "content_filter": "refusal"}.get(answer.finish, finish)
    message = {
        "id": new_id("msg_01"),
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": _content(answer, memory),
        "stop_reason": finish,
        "stop_sequence": None,
        "usage": _usage(usage),
    }
    return CloudReply(message, tuple(_events(message)), usage)


def _usage(usage: CloudUsage) -> dict[str, Any]:
    """Return it in Anthropic's words, in which `input_tokens` are those that were not cached."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "service_tier": "standard",
    }


def _content(answer: CloudAnswer, memory: CloudMemory) -> list[Block]:
    blocks: list[Block] = []
    if answer.thinking:
        signature = memory.signature(answer.thinking)
        blocks.append({"type": "thinking", "thinking": answer.thinking, "signature": signature})
    if answer.redacted:
        data = memory.sealed(answer.redacted)
        blocks.append({"type": "redacted_thinking", "data": data})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        head = {"type": "tool_use", "id": new_id("toolu_01"), "name": call.name}
        blocks.append({**head, "input": dict(call.arguments)})
    return blocks


def event(fields: dict[str, Any]) -> bytes:
    return f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n".encode()


def error_event(error: CloudError) -> bytes:
    return event(error_body("messages", error))


def _events(message: dict[str, Any]) -> Iterator[bytes]:
    begun = {**message, "content": [], "stop_reason": None}
    begun["usage"] = message["usage"] | {"output_tokens": 1}
    yield event({"type": "message_start", "message": begun})
    yield event({"type": "ping"})
    for index, block in enumerate(message["content"]):
        begin = block | EMPTY[block["type"]]
        yield event({"type": "content_block_start", "index": index, "content_block": begin})
        for delta in _deltas(block):
            yield event({"type": "content_block_delta", "index": index, "delta": delta})
        yield event({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    usage = message["usage"]
    yield event({"type": "message_delta", "delta": stop, "usage": usage})
    yield event({"type": "message_stop"})


# What of a block comes only in its deltas.
EMPTY: Final[dict[str, Block]] = {
    "thinking": {"thinking": "", "signature": ""},
    "redacted_thinking": {},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}


def _deltas(block: Block) -> Iterator[Block]:
    if block["type"] == "thinking":
        for piece in pieces(block["thinking"]):
            yield {"type": "thinking_delta", "thinking": piece}
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["type"] == "text":
        for piece in pieces(block["text"]):
            yield {"type": "text_delta", "text": piece}
    elif block["type"] == "tool_use":
        for piece in pieces(json.dumps(block["input"])):
            yield {"type": "input_json_delta", "partial_json": piece}

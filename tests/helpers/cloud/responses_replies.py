"""Writes answers as OpenAI's Responses does: items with ids, sealed reasoning, and events."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tests.helpers.cloud.cloud_answers import CloudAnswer, CloudError
from tests.helpers.cloud.cloud_memory import CloudMemory, CloudUsage, StoredItem, new_id
from tests.helpers.cloud.openai_replies import CloudReply, pieces, written

SEALED: Final = "reasoning.encrypted_content"
Item = dict[str, Any]


def responses_reply(
    body: Mapping[str, Any], items: list[Item], answer: CloudAnswer, memory: CloudMemory
) -> CloudReply:
    """Return the answer to `body`, whose whole prompt are `items`, and remember its items."""
    units = [body.get("instructions"), body.get("tools"), *map(_unnamed, items)]
    usage = memory.usage(body["model"], units, written(answer), answer.thinking)
    output = _output(body, answer, memory)
    is_stored = body.get("store") is not False
    reasoning = next((item["id"] for item in output if item["type"] == "reasoning"), None)
    for item in output:
        needs = reasoning if item["type"] != "reasoning" else None
        memory.items[item["id"]] = StoredItem(item, is_stored, needs)
    response = _response(body, output, usage)
    if answer.finish:
        reason = "max_output_tokens" if answer.finish == "length" else answer.finish
        response |= {"status": "incomplete", "incomplete_details": {"reason": reason}}
    if is_stored:
        memory.responses[response["id"]] = [*items, *output]
    return CloudReply(response, tuple(_events(response)), usage)


def _unnamed(item: Item) -> Item:
    """Return what of `item` counts as its text: ids and states may be told or not."""
    return {name: each for name, each in item.items() if name not in ("id", "status")}


def _output(body: Mapping[str, Any], answer: CloudAnswer, memory: CloudMemory) -> list[Item]:
    items: list[Item] = []
    if answer.thinking:
        summary = [{"type": "summary_text", "text": answer.thinking}]
        item = {"type": "reasoning", "id": new_id("rs_"), "summary": summary}
        if SEALED in (body.get("include") or ()):
            item["encrypted_content"] = memory.sealed(answer.thinking)
        items.append(item)
    if answer.text:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": new_id("msg_"), "status": "completed"}
        items.append({**head, "role": "assistant", "content": [part]})
    for call in answer.calls:
        told = {"call_id": new_id("call_"), "name": call.name, "status": "completed"}
        if call.is_custom:
            text = call.arguments["input"]
            items.append({"type": "custom_tool_call", "id": new_id("ctc_"), **told, "input": text})
        else:
            text = json.dumps(dict(call.arguments))
            items.append({"type": "function_call", "id": new_id("fc_"), **told, "arguments": text})
    return items


def _response(body: Mapping[str, Any], output: list[Item], usage: CloudUsage) -> dict[str, Any]:
    told = {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": body["model"],
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "store": body.get("store") is not False,
        "temperature": body.get("temperature", 1.0),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": told,
    }


# ---------------------------------------------------------------- stream


def numbered(events: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[bytes]:
    for number, (name, fields) in enumerate(events):
        text = json.dumps({"type": name, "sequence_number": number, **fields})
        yield f"event: {name}\ndata: {text}\n\n".encode()


def error_event(error: CloudError) -> bytes:
    told = {"type": "error", "sequence_number": 99, "code": error.code, "param": error.param}
    return f"event: error\ndata: {json.dumps(told | {'message': error.message})}\n\n".encode()


def _events(response: dict[str, Any]) -> Iterator[bytes]:
    return numbered(_told(response))


def _told(response: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        yield "response.output_item.added", {**place, "item": _begun(item)}
        yield from _item_events({"item_id": item["id"], **place}, item)
        yield "response.output_item.done", {**place, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _begun(item: Item) -> Item:
    empty = {"content": [], "summary": [], "arguments": "", "input": ""}
    kept = {name: empty.get(name, each) for name, each in item.items()}
    return kept | ({"status": "in_progress"} if "status" in item else {})


def _item_events(place: dict[str, Any], item: Item) -> Iterator[tuple[str, dict[str, Any]]]:
    if item["type"] == "reasoning":
        yield from _reasoning_events({**place, "summary_index": 0}, item["summary"][0])
    elif item["type"] == "message":
        yield from _text_events({**place, "content_index": 0}, item["content"][0])
    else:
        is_function = item["type"] == "function_call"
        name = "arguments" if is_function else "input"
        kind = "function_call_arguments" if is_function else "custom_tool_call_input"
        for piece in pieces(item[name]):
            yield f"response.{kind}.delta", {**place, "delta": piece}
        yield f"response.{kind}.done", {**place, name: item[name]}


def _reasoning_events(
    place: dict[str, Any], part: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = "response.reasoning_summary"
    yield f"{kind}_part.added", {**place, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield f"{kind}_text.delta", {**place, "delta": piece}
    yield f"{kind}_text.done", {**place, "text": part["text"]}
    yield f"{kind}_part.done", {**place, "part": part}


def _text_events(
    place: dict[str, Any], part: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield "response.output_text.delta", {**place, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**place, "part": part}

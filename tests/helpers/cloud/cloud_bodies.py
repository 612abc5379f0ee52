"""Checks bodies as the real services do, by the fields of their own SDKs."""

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Final

from anthropic.types import (
    ContentBlockParam,
    message_count_tokens_params as counted,
    message_create_params as messages,
)
from anthropic.types.beta import BetaContentBlockParam, message_create_params as beta
from openai.types import completion_create_params as completions, embedding_create_params as vectors
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
from pydantic import ConfigDict, TypeAdapter, ValidationError

from tests.helpers.cloud.cloud_answers import CloudError, CloudMemory, Row, without


class RefusedBody(Exception):
    """A body that the real service would not take."""

    def __init__(self, error: CloudError) -> None:
        super().__init__(error.message)
        self.error = error


def _require(is_held: object, why: str, status: int = 400) -> None:
    if not is_held:
        raise RefusedBody(CloudError(status, why))


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return what refuses each field, at any depth, that the SDK's type does not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a type that says itself that it takes more
        return TypeAdapter(list[kind], config=ConfigDict(extra="forbid"))


_TYPES: Final = {
    "chat": _adapter(chat.CompletionCreateParamsBase),
    "completions": _adapter(completions.CompletionCreateParamsBase),
    "embeddings": _adapter(vectors.EmbeddingCreateParams),
    "responses": _adapter(responses.ResponseCreateParamsBase),
    "messages": _adapter(messages.MessageCreateParamsBase),
    "beta": _adapter(beta.MessageCreateParamsBase),
    "count": _adapter(counted.MessageCountTokensParams),
    "block": _adapter(ContentBlockParam),
    "beta block": _adapter(BetaContentBlockParam),
}
# Taken by the services, though the SDKs' types do not have them.
_UNTYPED: Final = {"stream"}
_UNTYPED_OF_CLAUDE: Final = {"stream", "temperature", "top_p", "top_k"}


def _check_type(kind: str, value: Any) -> None:
    try:
        _walk(_TYPES[kind].validate_python([value]))
    except ValidationError as error:
        raise RefusedBody(CloudError(400, str(error))) from None


def _walk(value: Any) -> None:
    """Read the iterables in `value`, which are validated as they are read."""
    if not isinstance(value, str) and isinstance(value, Iterable):
        for each in value.values() if isinstance(value, Mapping) else value:
            _walk(each)


def check_body(dialect: str, body: Row, memory: CloudMemory, *, is_beta: bool = False) -> None:
    """Raises: RefusedBody: the service of `dialect` would not take `body`."""
    is_claude = dialect in ("messages", "count")
    left_out = _UNTYPED_OF_CLAUDE if is_claude else _UNTYPED
    known = {name: each for name, each in body.items() if name not in left_out}
    if is_claude:
        _check_type("beta" if is_beta and dialect == "messages" else dialect, known)
        _check_messages(body, memory, "beta block" if is_beta else "block")
        return
    if dialect == "responses":
        given = body.get("input")
        rows = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
        _require(rows, "Missing required parameter: 'input'.")
        known["input"] = without([_named(row) for row in rows], set())
        known["tools"] = [
            {"strict": None} | tool if tool.get("type") == "function" else tool
            for tool in body.get("tools") or ()
        ]
        _check_type(dialect, known)
        _check_items(body, rows, memory)
        return
    if dialect == "chat":
        _check_chat(body)
        known["messages"] = without(body["messages"], {"annotations", "index"})
    _check_type(dialect, known)


def _named(row: Row) -> Row:
    """Return an item with what the SDK's type requires, and one without an id need not have."""
    if row.get("type") == "reasoning":
        return {"id": "rs_"} | row
    if row.get("role", "assistant") != "assistant":  # clients name what they say themselves
        return {name: each for name, each in row.items() if name != "id"}
    if "role" not in row or not isinstance(row.get("content"), list):
        return row
    parts = [{"annotations": []} | part for part in row["content"]]
    return {"type": "message", "id": "msg_", "status": "completed"} | row | {"content": parts}


def _check_chat(body: Row) -> None:
    """Each call has its result right behind, and each result its call before."""
    waiting: set[str] = set()
    _require(body.get("messages"), "Missing required parameter: 'messages'.")
    for row in [*body["messages"], {"role": "end", "content": ""}]:
        if row["role"] == "tool":
            _require(row["tool_call_id"] in waiting, "'tool' must be a response to 'tool_calls'.")
            waiting.discard(row["tool_call_id"])
            continue
        _require(not waiting, f"tool_call_ids did not have response messages: {waiting}")
        waiting = {call["id"] for call in row.get("tool_calls") or []}
        is_said = row.get("content") is not None or row.get("tool_calls") or row.get("refusal")
        _require(is_said, "Invalid value for 'content': expected a string, got null.")
    _require(body.get("stream") or not body.get("stream_options"), "'stream_options' needs stream.")


def _blocks(row: Row) -> list[Row]:
    content = row["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _check_messages(body: Row, memory: CloudMemory, block_type: str) -> None:
    rows = body["messages"]
    _require(rows and rows[0]["role"] == "user", "messages: the first is of the user")
    for row, after in zip(rows, [*rows[1:], {"content": []}], strict=True):
        _require(row["content"] or row is rows[-1], "all messages must have non-empty content")
        for block in _blocks(row):
            _check_type(block_type, block)
            _check_block(block, memory)
        asked = {block["id"] for block in _blocks(row) if block["type"] == "tool_use"}
        told = {block["tool_use_id"] for block in _blocks(after) if block["type"] == "tool_result"}
        _require(asked == told, f"`tool_use` without `tool_result` or back: {asked ^ told}")
    _check_thinking(body)
    marks = len(re.findall(r'"cache_control": \{', json.dumps(body)))
    _require(marks <= 4, f"A maximum of 4 blocks with cache_control, found {marks}.")


def _check_block(block: Row, memory: CloudMemory) -> None:
    kind = block["type"]
    if kind == "text":
        _require(block["text"].strip(), "text content blocks must contain non-whitespace text")
    if kind == "thinking":
        is_signed = memory.seals.get(block["signature"]) == block["thinking"]
        _require(is_signed, "Invalid `signature` in `thinking` block")
    if kind == "redacted_thinking":
        _require(block["data"] in memory.seals, "Invalid `data` in `redacted_thinking`")
    if kind == "tool_use":
        _require(re.fullmatch(r"[a-zA-Z0-9_-]+", block["id"]), "tool_use.id: should match pattern")


def _check_thinking(body: Row) -> None:
    """A turn that has called tools and goes on begins with its thinking, where that is enabled."""
    thinking = body.get("thinking") or {}
    if thinking.get("type") != "enabled":
        edits = (body.get("context_management") or {}).get("edits") or ()
        _require(not edits or thinking, "clear_thinking needs `thinking`")
        return
    budget = thinking["budget_tokens"]
    _require(1024 <= budget < body.get("max_tokens", budget + 1), "thinking.enabled.budget_tokens")
    _require(body.get("temperature", 1) == 1, "`temperature` may only be set to 1 with thinking")
    said = [number for number, row in enumerate(body["messages"]) if row["role"] == "assistant"]
    after = body["messages"][said[-1] + 1 :][:1] if said else []
    if any(block["type"] == "tool_result" for row in after for block in _blocks(row)):
        first = _blocks(body["messages"][said[-1]])[0]["type"]
        _require(first in ("thinking", "redacted_thinking"), "a turn must start with thinking")


def _check_items(body: Row, rows: list[Row], memory: CloudMemory) -> None:
    """Items of the service are its own, in their pairs, and with the reasoning that they need."""
    previous = body.get("previous_response_id")
    _require(previous is None or previous in memory.responses, f"'{previous}' not found.")
    waiting = {row["call_id"] for row in memory.responses.get(str(previous), ()) if _is_call(row)}
    seen = {row.get("id") for row in rows if row.get("type") == "reasoning"}
    for row, after in zip(rows, [*rows[1:], {}], strict=True):
        kind, name = row.get("type", "message"), row.get("id")
        is_clients = kind.endswith("_output") or (kind == "message" and row["role"] != "assistant")
        if name is not None and not is_clients:  # clients name what they say themselves
            is_stored, needs = memory.items.get(name, (False, None))
            has_content = "encrypted_content" in row or kind not in ("reasoning", "item_reference")
            is_known = name in memory.items and (is_stored or has_content)
            _require(is_known, f"Item with id '{name}' not found.", 404)
            _require(needs is None or needs in seen, f"'{name}' without its required 'reasoning'")
        if kind == "reasoning":
            blob = row.get("encrypted_content")
            _require(blob or name, "Missing required parameter: 'id'.")
            _require(not blob or blob in memory.seals, "The encrypted content is not verified.")
            is_led = after.get("role") == "assistant" or _is_call(after)
            _require(is_led, "'reasoning' was provided without its required following item.")
        if _is_call(row):
            waiting.add(row["call_id"])
        elif kind.endswith("_output"):
            _require(row["call_id"] in waiting, "No tool call found for function call output")
            waiting.discard(row["call_id"])
    _require(not waiting, f"No tool output found for function call {waiting}.")


def _is_call(row: Row) -> bool:
    return str(row.get("type")).endswith("_call")

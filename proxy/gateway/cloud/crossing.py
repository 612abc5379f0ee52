"""Takes out of a conversation what only this server made and no provider takes.

A session may begin on a local model and go on in the cloud. Our thinking carries signatures that no
provider verifies, and our items ids that it never gave; both are told by their form, so no memory
is needed. What a provider made passes as it is: encrypted reasoning, signed thinking, its ids. Our
ids of calls stay: they name a result's call, and no provider asks who gave them.
"""

from collections.abc import Mapping
from typing import Any, Final

from hearth.shared.our_ids import (
    is_our_call_id,
    is_our_item_id,
    is_our_response_id,
    is_our_signature,
)

Row = dict[str, Any]
_THOUGHTS: Final = ("thinking", "redacted_thinking")
_CLEARS_THINKING: Final = "clear_thinking_"  # begins an edit of context_management


def for_cloud(dialect: str, body: Row) -> Row:
    """Return `body` as a provider takes it; `body` itself stays as it is.

    Of Responses, ResponseStore.for_cloud has put in what the body refers to.
    """
    if dialect in ("messages", "messages_count"):
        return _messages(body)
    if dialect == "chat":
        return body | {"messages": _turns(body.get("messages"), _chat_turn)}
    if dialect in ("responses", "responses_count"):
        return _responses(body)
    return body


def _turns(value: Any, of_assistant: Any) -> Any:
    """Return messages, those of the assistant as `of_assistant` gives them, or without them."""
    if type(value) is not list:
        return value
    kept = []
    for row in value:
        is_turn = type(row) is dict and row.get("role") == "assistant"
        if (turn := of_assistant(row) if is_turn else row) is not None:
            kept.append(turn)
    return kept


# ---------------------------------------------------------------- Messages


def _messages(body: Row) -> Row:
    body = body | {"messages": _turns(body.get("messages"), _messages_turn)}
    thinking = body.get("thinking")
    is_enabled = type(thinking) is dict and thinking.get("type") == "enabled"
    return _without_thinking(body) if is_enabled and _calls_unthought(body["messages"]) else body


def _messages_turn(row: Row) -> Row | None:
    """Return a turn without our thinking; None where nothing is left: users may follow users."""
    content = row.get("content")
    if type(content) is not list:
        return row if content else None
    kept = [block for block in content if type(block) is not dict or not _is_void(block)]
    return row | {"content": kept} if kept else None


def _is_void(block: Row) -> bool:
    """Return whether a provider refuses `block`: our thinking, unsigned thinking, an empty text."""
    kind = block.get("type")
    if kind == "thinking":
        return not block.get("signature") or is_our_signature(block["signature"])
    if kind == "redacted_thinking":
        return not block.get("data") or is_our_signature(block["data"])
    if kind == "text":
        text = block.get("text")
        return type(text) is str and not text.strip()
    return False


def _calls_unthought(messages: Any) -> bool:
    """Return whether the last turn called tools and does not begin with thinking.

    Anthropic refuses that together with thinking of type enabled: the turn is not over.
    """
    rows = messages if type(messages) is list else []
    turns = (row for row in reversed(rows) if type(row) is dict and row.get("role") == "assistant")
    content = next(turns, {}).get("content")
    kinds = [block.get("type") for block in content or () if type(block) is dict]
    return type(content) is list and "tool_use" in kinds and kinds[0] not in _THOUGHTS


def _without_thinking(body: Row) -> Row:
    """Return `body` that does not ask for thinking, nor for edits of it, which need it on."""
    body = {name: value for name, value in body.items() if name != "thinking"}
    managed = body.get("context_management")
    if type(managed) is dict and type(managed.get("edits")) is list:
        edits = [edit for edit in managed["edits"] if not _clears_thinking(edit)]
        body["context_management"] = managed | {"edits": edits}
        if not edits:
            del body["context_management"]
    return body


def _clears_thinking(edit: Any) -> bool:
    kind = edit.get("type") if type(edit) is dict else None
    return type(kind) is str and kind.startswith(_CLEARS_THINKING)


# ---------------------------------------------------------------- chat


def _chat_turn(row: Row) -> Row:
    """Return a turn without our thinking.

    Reasoning as a plain text has no mark of who wrote it, and providers pass over it or refuse it;
    only amid calls does one want its own back, and a call's id tells whose it is.
    """
    turn = {name: value for name, value in row.items() if name not in ("reasoning", _REASONING)}
    if row.get(_REASONING) and _called_elsewhere(row.get("tool_calls")):
        turn[_REASONING] = row[_REASONING]
    for name in ("thinking_blocks", "content"):
        if type(turn.get(name)) is list:
            kept = [part for part in turn[name] if not _is_our_thought(part)]
            turn[name] = kept
            if not kept:
                del turn[name]
    if turn.get("content") is None and not any(turn.get(name) for name in _SAYING):
        turn["content"] = ""
    return turn


_REASONING: Final = "reasoning_content"
_SAYING: Final = ("tool_calls", "function_call", "refusal", "audio")  # need no content beside them


def _called_elsewhere(calls: Any) -> bool:
    ids = [call.get("id") for call in calls if type(call) is dict] if type(calls) is list else []
    return bool(ids) and not any(is_our_call_id(call_id) for call_id in ids)


def _is_our_thought(part: Any) -> bool:
    return type(part) is dict and part.get("type") in _THOUGHTS and _is_void(part)


# ---------------------------------------------------------------- Responses


def _responses(body: Row) -> Row:
    if is_our_response_id(body.get("previous_response_id")):
        body = {name: value for name, value in body.items() if name != "previous_response_id"}
    given = body.get("input")
    if type(given) is not list:
        return body
    kept = [_plain_item(item) for item in given if not _is_our_reasoning(item)]
    return body | {"input": kept}


def _is_our_reasoning(item: Any) -> bool:
    """Return whether an item is reasoning that no provider can take up again."""
    if type(item) is not dict or item.get("type") != "reasoning":
        return False
    sealed, item_id = item.get("encrypted_content"), item.get("id")
    return is_our_signature(sealed) or is_our_item_id(item_id) or not (sealed or item_id)


def _plain_item(item: Any) -> Any:
    """Return an item without an id of ours: a provider looks for it among its own."""
    if type(item) is dict and is_our_item_id(item.get("id")):
        return without(item, "id")
    return item


def without(row: Mapping[str, Any], name: str) -> Row:
    return {each: value for each, value in row.items() if each != name}

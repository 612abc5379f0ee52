"""Tells what only this server made and no provider takes, for the rules of what goes to a cloud.

A session may begin on a local model and go on in the cloud. Our thinking carries signatures that no
provider verifies, and our items ids that it never gave; both are told by their form, so no memory
is needed. What a provider made passes as it is: encrypted reasoning, signed thinking, its ids. Our
ids of calls stay: they name a result's call, and no provider asks who gave them.
"""

from typing import Any, Final

from hearth.proxy.gateway.cloud.allowed_parts import Row
from hearth.shared.our_ids import (
    is_our_call_id,
    is_our_item_id,
    is_our_response_id,
    is_our_signature,
)

_THOUGHTS: Final = ("thinking", "redacted_thinking")
_CLEARS_THINKING: Final = "clear_thinking_"  # begins an edit of context_management
_SAYING: Final = ("tool_calls", "function_call", "refusal", "audio")  # need no content beside them


def is_unsealed(seal: str, row: Row, _: Any) -> bool:
    """Return whether no provider has filled the field `seal` of this thinking.

    An id without it may be of another client's.
    """
    return not row.get(seal) or is_our_signature(row[seal])


def is_our_reasoning(item: Row, _: Any) -> bool:
    """Return whether an item of Responses is reasoning that no provider can take up again."""
    sealed, item_id = item.get("encrypted_content"), item.get("id")
    return is_our_signature(sealed) or is_our_item_id(item_id) or not (sealed or item_id)


def is_blank(block: Row, role: Any) -> bool:
    """Return whether a block of a turn is an empty text, which Anthropic refuses."""
    text = block.get("text")
    return role == "assistant" and type(text) is str and not text.strip()


def says_nothing(message: Row, _: Any) -> bool:
    """Return whether a message is a turn without content: users may follow users."""
    return message.get("role") == "assistant" and not message.get("content")


def foreign_id(value: Any, *_: Any) -> Any:
    """Return the id of an item or a response less one of ours: a provider looks for its own."""
    return None if is_our_item_id(value) or is_our_response_id(value) else value


def end_chat_turns(messages: list[Row]) -> None:
    """Take plain reasoning out of `messages` in place, and let the rest be a turn without it.

    Reasoning as a plain text has no mark of who wrote it, and providers pass over it or refuse it;
    only amid calls does one want its own back, and a call's id tells whose it is.
    """
    for row in messages:
        if "reasoning_content" in row:
            ids = [call.get("id") for call in row.get("tool_calls") or ()]
            if not ids or any(map(is_our_call_id, ids)):
                del row["reasoning_content"]
        content, role = row.get("content"), row.get("role")
        is_silent = content is None and role != "user" and not any(map(row.get, _SAYING))
        if content == [] or is_silent:  # which no provider takes
            row["content"] = ""


def end_thinking(body: Row) -> None:
    """Take `thinking` of type enabled out of `body`, in place, where its last turn began without.

    Anthropic refuses it where that turn called tools, since the turn is not over; and edits of
    thinking, which need it on.
    """
    thinking = body.get("thinking")
    if type(thinking) is not dict or thinking.get("type") != "enabled":
        return
    turns = [row["content"] for row in body["messages"] if row.get("role") == "assistant"]
    last = turns[-1] if turns and type(turns[-1]) is list else []
    kinds = [block["type"] for block in last]
    if "tool_use" not in kinds or kinds[0] in _THOUGHTS:
        return
    del body["thinking"]
    managed = body.get("context_management")
    if type(managed) is dict and type(managed.get("edits")) is list:
        edits = [edit for edit in managed["edits"] if not _clears_thinking(edit)]
        body["context_management"] = managed | {"edits": edits}
        if not edits:
            del body["context_management"]


def _clears_thinking(edit: Any) -> bool:
    kind = edit.get("type") if type(edit) is dict else None
    return type(kind) is str and kind.startswith(_CLEARS_THINKING)

"""Checks bodies of OpenAI's chat, completions and embeddings as the real service does."""

from collections.abc import Mapping, Set as AbstractSet
from typing import Any, Final

from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params

from tests.helpers.cloud.cloud_answers import invalid

_STREAM: Final = frozenset({"stream"})
FIELDS: Final = {
    "chat": _STREAM | set(chat_params.CompletionCreateParamsBase.__annotations__),
    "completions": _STREAM
    | set(completion_create_params.CompletionCreateParamsBase.__annotations__),
    "embeddings": set(embedding_create_params.EmbeddingCreateParams.__annotations__),
}
MESSAGE_FIELDS: Final = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {
        *("role", "content", "name", "refusal", "audio", "tool_calls", "function_call"),
        "annotations",  # as its own answers have them, which its documentation sends back whole
    },
    "tool": {"role", "content", "tool_call_id"},
}
PART_FIELDS: Final = {
    "text": {"type", "text"},
    "image_url": {"type", "image_url"},
    "input_audio": {"type", "input_audio"},
    "file": {"type", "file"},
    "refusal": {"type", "refusal"},
}


def check_fields(body: Mapping[str, Any], known: AbstractSet[str]) -> None:
    for name in body:
        if name not in known:
            raise invalid(f"Unrecognized request argument supplied: {name}")


def check_chat(body: Mapping[str, Any]) -> None:
    """Raises: RefusedBodyError."""
    check_fields(body, FIELDS["chat"])
    rows = body.get("messages")
    if not isinstance(rows, list) or not rows:
        raise invalid("Missing required parameter: 'messages'.", "messages")
    for number, row in enumerate(rows):
        _check_message(f"messages[{number}]", row)
    _check_pairs(rows)
    _check_tools(body.get("tools") or [])
    if body.get("stream_options") is not None and not body.get("stream"):
        raise invalid("The 'stream_options' parameter is only allowed when 'stream' is enabled.")


def _check_message(place: str, row: Mapping[str, Any]) -> None:
    known = MESSAGE_FIELDS.get(str(row.get("role")))
    if known is None:
        raise invalid(f"Invalid value: {row.get('role')!r}.", f"{place}.role")
    for name in row:
        if name not in known:
            raise invalid(f"Unknown parameter: '{place}.{name}'.", place, "unknown_parameter")
    content = row.get("content")
    if content is None and not (row.get("tool_calls") or row.get("refusal")):
        raise invalid(f"Invalid value for 'content': expected a string, got null. ({place})")
    for number, part in enumerate(content if isinstance(content, list) else []):
        allowed = PART_FIELDS.get(str(part.get("type")))
        if allowed is None or set(part) - allowed:
            where = f"{place}.content[{number}]"
            raise invalid(f"Unknown parameter: '{where}' {sorted(part)}.", where)


def _check_pairs(rows: list[dict[str, Any]]) -> None:
    """Each call has its result right behind, and each result its call before."""
    waiting: set[str] = set()
    for row in rows:
        if row["role"] == "tool":
            if row.get("tool_call_id") not in waiting:
                raise invalid(
                    "Invalid parameter: messages with role 'tool' must be a response to a "
                    "preceeding message with 'tool_calls'."
                )
            waiting.discard(row["tool_call_id"])
            continue
        _check_none_waits(waiting)
        waiting = {call["id"] for call in row.get("tool_calls") or []}
    _check_none_waits(waiting)


def _check_none_waits(waiting: set[str]) -> None:
    if waiting:
        raise invalid(
            "An assistant message with 'tool_calls' must be followed by tool messages responding "
            f"to each 'tool_call_id'. The following tool_call_ids did not have response "
            f"messages: {', '.join(sorted(waiting))}"
        )


def _check_tools(tools: list[dict[str, Any]]) -> None:
    for number, tool in enumerate(tools):
        if set(tool) - {"type", "function", "custom"} or tool.get("type") not in tool:
            raise invalid(f"Unknown parameter in 'tools[{number}]': {sorted(tool)}.")
        extra = set(tool.get("function") or {}) - {"name", "description", "parameters", "strict"}
        if extra:
            raise invalid(f"Unknown parameter: 'tools[{number}].function' {sorted(extra)}.")


def check_completions(body: Mapping[str, Any]) -> None:
    check_fields(body, FIELDS["completions"])
    if "prompt" not in body:
        raise invalid("Missing required parameter: 'prompt'.", "prompt")


def check_embeddings(body: Mapping[str, Any]) -> None:
    check_fields(body, FIELDS["embeddings"])
    if not body.get("input"):
        raise invalid("'$.input' is invalid.", "input")

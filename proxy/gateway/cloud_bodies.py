"""Makes the body and the headers for a cloud model from a client's request.

LiteLLM acts upon many fields of a body, which may name another address for the request and the
user's key, another model's key, callbacks, files or MCP servers. So the body is built anew from the
fields in `cloud_fields`, at every level, and everything else is dropped. Tools of other kinds, and
such blocks of the history, are left out, as for local models; a user's content that cannot pass is
refused.

A schema for which LiteLLM would need gigabytes is refused too. For Gemini, Bedrock and others
LiteLLM inlines each $ref, and keeps a table of all definitions for every object that is left to
read. `litellm_server` limits the size of an inlined schema.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from hearth.proxy.api.body.message_content import log_left_out
from hearth.proxy.gateway.cloud_fields import BODY, Record
from hearth.proxy.http.http_exchange import RawHeaders
from hearth.shared.errors import RequestError
from hearth.shared.our_ids import is_our_call_id

_THOUGHTS: Final = ("thinking", "redacted_thinking")
_CLEARS_THINKING: Final = "clear_thinking_"  # beginning of an edit's type in context_management
_SAYING: Final = ("tool_calls", "function_call", "refusal", "audio")  # fields that replace content


def end_chat_turns(messages: list[Record]) -> None:
    """Remove plain reasoning from `messages` in place, and give a content to turns left empty.

    Plain reasoning does not name the model that wrote it, and providers ignore or refuse it. A
    provider wants only its own reasoning back, with tool calls whose ids name their maker.
    """
    for message in messages:
        if "reasoning_content" in message:
            ids = [call.get("id") for call in message.get("tool_calls") or ()]
            if not ids or any(map(is_our_call_id, ids)):
                del message["reasoning_content"]
        content, role = message.get("content"), message.get("role")
        is_silent = content is None and role != "user" and not any(map(message.get, _SAYING))
        if content == [] or is_silent:  # no provider accepts such a message
            message["content"] = ""


def end_thinking(body: Record) -> None:
    """Remove enabled `thinking` from `body` in place, if the last turn called tools without it.

    Anthropic refuses to switch thinking on amid such a turn. The edits of thinking in
    `context_management` need thinking on, so they are removed too.
    """
    thinking = body.get("thinking")
    if type(thinking) is not dict or thinking.get("type") != "enabled":
        return
    turns = [turn["content"] for turn in body["messages"] if turn.get("role") == "assistant"]
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


ROOM_MAX: Final = 10_000_000  # a schema's JSON values times its definitions; takes half a GB
_FIELDS: Final = (
    *("tools", "functions", "response_format", "text", "output_format", "output_config"),
)
_DEFINITIONS: Final = ("$defs", "definitions", "schemas")


def check_schemas(body: dict[str, Any]) -> None:
    """Refuse a schema in `body` that is over ROOM_MAX. Raises: RequestError: 400."""
    for name in _FIELDS:
        value = body.get(name)
        for schema in value if type(value) is list else [value]:
            values, definitions = _counts(schema)
            if values * definitions > ROOM_MAX:
                raise RequestError(
                    f"{name} has a schema of {values:,} JSON values and {definitions:,} "
                    f"definitions, and this server sends a cloud model at most {ROOM_MAX:,} of "
                    "both multiplied. Define fewer.",
                    param=name,
                )


def _counts(schema: Any) -> tuple[int, int]:
    """Return how many JSON values and how many definitions there are within `schema`."""
    waiting = [schema]
    values = definitions = 0
    while waiting:
        value = waiting.pop()
        values += 1
        if type(value) is dict:
            defined = (value[name] for name in _DEFINITIONS if type(value.get(name)) is dict)
            definitions += sum(map(len, defined))
            waiting += value.values()
        elif type(value) is list:
            waiting += value
    return values, definitions


CloudDialect = Literal[
    "chat",
    "completions",
    "messages",
    "messages_count",
    "responses",
    "responses_count",
    "embeddings",
]

HEADER_CHARS_MAX: Final = 1_024
_HEADERS: Final = {  # the headers that pass, with the form of their values
    "anthropic-version": re.compile(r"\d{4}-\d\d-\d\d"),
    "anthropic-beta": re.compile(r"[a-z0-9._-]+(?: ?, ?[a-z0-9._-]+)*", re.I),
    "user-agent": re.compile(r"[ -~]+"),
}


def cloud_body(dialect: CloudDialect, body: Record, group: str) -> Record:
    """Return the body for the model `group`, made from `body`, which does not change.

    ResponseStore.for_cloud has already handled what a Responses body refers to.

    Raises:
        RequestError: `body` has not the API's shape, or its content cannot pass.
    """
    allowed = BODY[dialect]
    left_out: list[str] = []
    given = {
        name: value
        for name, value in body.items()
        if value is not None or name not in allowed.rules
    }
    picked = (allowed(given, "", "", left_out) or {}) | {"model": group}
    _choose_among_tools(picked, given, left_out)
    if dialect == "chat":
        end_chat_turns(picked["messages"])
    elif "thinking" in picked:
        end_thinking(picked)
    check_schemas(picked)
    log_left_out(left_out)
    return picked


def _choose_among_tools(picked: Record, given: Record, left_out: list[str]) -> None:
    """Remove the choice of a dropped tool; without any tool left, remove all fields for tools."""
    choice = picked.get("tool_choice")
    chosen: Any = choice.get("type") if type(choice) is dict else None
    if "tools" in given and not picked.get("tools"):
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            picked.pop(name, None)
    elif chosen in left_out:
        del picked["tool_choice"]


def cloud_headers(headers: Mapping[str, str]) -> RawHeaders:
    """Return the headers for the cloud from a client's `headers` (names in lower case)."""
    passed = [(b"content-type", b"application/json")]
    for name, pattern in _HEADERS.items():
        value = headers.get(name, "")
        if len(value) <= HEADER_CHARS_MAX and pattern.fullmatch(value):
            passed.append((name.encode(), value.encode()))
    return passed

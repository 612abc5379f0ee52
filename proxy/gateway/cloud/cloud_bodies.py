"""Makes the body and the headers that a cloud model is sent of those that a client sent.

LiteLLM acts upon many names that a body may hold: another address for the request and the user's
key with it, another model's key, callbacks, files, MCP servers. So a body is built anew of the
fields in `cloud_fields`, in the parts that it nests too, and everything else stays behind. A tool,
or a block of the history, of a kind that does not pass is left out as the local side leaves it out;
what a user shows and the cloud would not be shown is refused.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from hearth.proxy.api.body.message_content import note_left_out
from hearth.proxy.gateway.cloud import cloud_fields, crossing
from hearth.proxy.gateway.cloud.allowed_parts import Row
from hearth.proxy.gateway.cloud.schema_limits import check_schemas
from hearth.proxy.http.http_exchange import RawHeaders

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
_HEADERS: Final = {  # whose values say nothing but this
    "anthropic-version": re.compile(r"\d{4}-\d\d-\d\d"),
    "anthropic-beta": re.compile(r"[a-z0-9._-]+(?: ?, ?[a-z0-9._-]+)*", re.I),
    "user-agent": re.compile(r"[ -~]+"),
}


def cloud_body(dialect: CloudDialect, body: Row, group: str) -> Row:
    """Return the body that the model `group` is sent; `body` stays as it is.

    Of a Responses body, ResponseStore.for_cloud has judged what it refers to.

    Raises:
        RequestError: it is not of the API's shape, or shows or needs what does not pass.
    """
    allowed = cloud_fields.BODY[dialect]
    left_out: list[str] = []
    given = {
        name: value
        for name, value in body.items()
        if value is not None or name not in allowed.rules
    }
    picked = (allowed(given, "", "", left_out) or {}) | {"model": group}
    _choose_among_tools(picked, given, left_out)
    if dialect == "chat":
        crossing.end_chat_turns(picked["messages"])
    elif "thinking" in picked:
        crossing.end_thinking(picked)
    check_schemas(picked)
    note_left_out(left_out)
    return picked


def _choose_among_tools(picked: Row, given: Row, left_out: list[str]) -> None:
    """Take out what chooses a tool that was left out, and all that goes with the last tool."""
    choice = picked.get("tool_choice")
    chosen: Any = choice.get("type") if type(choice) is dict else None
    if "tools" in given and not picked.get("tools"):
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            picked.pop(name, None)
    elif chosen in left_out:
        del picked["tool_choice"]


def cloud_headers(headers: Mapping[str, str]) -> RawHeaders:
    """Return what of a client's `headers`, their names in lower case, goes with the body."""
    passed = [(b"content-type", b"application/json")]
    for name, pattern in _HEADERS.items():
        value = headers.get(name, "")
        if len(value) <= HEADER_CHARS_MAX and pattern.fullmatch(value):
            passed.append((name.encode(), value.encode()))
    return passed

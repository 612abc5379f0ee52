"""Checks bodies of Anthropic's Messages as the real service does: signatures, pairs, fields."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params

from tests.helpers.cloud.cloud_answers import invalid
from tests.helpers.cloud.cloud_memory import CloudMemory

FIELDS: Final = {"stream", *message_create_params.MessageCreateParamsBase.__annotations__} | {
    *("temperature", "top_p", "top_k"),  # deprecated in the SDK's types, taken by the service
}
BETA_FIELDS: Final = set(beta_params.MessageCreateParamsBase.__annotations__) - {"betas"}
COUNT_FIELDS: Final = set(message_count_tokens_params.MessageCountTokensParams.__annotations__)
BLOCK_FIELDS: Final = {
    "text": {"type", "text", "cache_control", "citations"},
    "image": {"type", "source", "cache_control", "transformations"},
    "document": {"type", "source", "cache_control", "citations", "context", "title"},
    "thinking": {"type", "thinking", "signature"},
    "redacted_thinking": {"type", "data"},
    "tool_use": {"type", "id", "name", "input", "cache_control", "caller", "toolset_name"},
    "tool_result": {
        *("type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"),
    },
}
THOUGHTS: Final = ("thinking", "redacted_thinking")
MARKS_MAX: Final = 4
BUDGET_MIN: Final = 1024
ID: Final = re.compile(r"[a-zA-Z0-9_-]+")
Block = dict[str, Any]


def check_messages(
    body: Mapping[str, Any], memory: CloudMemory, *, is_beta: bool, counts: bool = False
) -> None:
    """Raises: RefusedBodyError."""
    known = (COUNT_FIELDS if counts else FIELDS) | (BETA_FIELDS if is_beta else set())
    for name in body:
        if name not in known:
            raise invalid(f"{name}: Extra inputs are not permitted")
    if not counts and not isinstance(body.get("max_tokens"), int):
        raise invalid("max_tokens: Field required")
    _check_thinking(body)
    rows = _rows(body)
    for number, row in enumerate(rows):
        for index, block in enumerate(row):
            _check_block(f"messages.{number}.content.{index}", block, memory)
    _check_pairs(rows)
    _check_last_turn(body, rows)
    _check_tools(body.get("tools") or [])
    if (found := sum(1 for _ in _marks(body))) > MARKS_MAX:
        text = f"A maximum of {MARKS_MAX} blocks with cache_control may be provided. Found {found}."
        raise invalid(text)


def _check_thinking(body: Mapping[str, Any]) -> None:
    thinking = body.get("thinking") or {}
    if thinking.get("type") != "enabled":
        return
    budget = thinking.get("budget_tokens", 0)
    if budget < BUDGET_MIN:
        raise invalid(
            "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024"
        )
    if budget >= body.get("max_tokens", budget + 1):
        raise invalid("`max_tokens` must be greater than `thinking.budget_tokens`")
    if body.get("temperature", 1) != 1:
        raise invalid("`temperature` may only be set to 1 when thinking is enabled")


def _rows(body: Mapping[str, Any]) -> list[list[Block]]:
    """Return each message's blocks. Raises: RefusedBodyError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages: at least one message is required")
    for number, row in enumerate(messages):
        if set(row) - {"role", "content"}:
            extra = sorted(set(row) - {"role", "content"})[0]
            raise invalid(f"messages.{number}.{extra}: Extra inputs are not permitted")
        roles = ("user", "assistant", "system") if number else ("user",)
        if row.get("role") not in roles:
            raise invalid(f'messages.{number}: Unexpected role "{row.get("role")}".')
        is_final = number == len(messages) - 1 and row["role"] == "assistant"
        if not row.get("content") and not is_final:
            raise invalid(f"messages.{number}: all messages must have non-empty content")
    return [_blocks(row["content"]) for row in messages]


def _blocks(content: Any) -> list[Block]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _check_block(place: str, block: Block, memory: CloudMemory) -> None:
    kind = str(block.get("type"))
    known = BLOCK_FIELDS.get(kind)
    if known is None:
        raise invalid(f"{place}: Input tag '{kind}' found using 'type' does not match")
    for name in block:
        if name not in known:
            raise invalid(f"{place}.{kind}.{name}: Extra inputs are not permitted")
    if kind == "text" and not block["text"].strip():
        raise invalid(f"{place}: text content blocks must contain non-whitespace text")
    if kind == "thinking" and not memory.is_signed(block["thinking"], block.get("signature")):
        raise invalid(f"{place}: Invalid `signature` in `thinking` block")
    if kind == "redacted_thinking" and memory.opened(block.get("data")) is None:
        raise invalid(f"{place}: Invalid `data` in `redacted_thinking` block")
    if kind == "tool_use" and not ID.fullmatch(str(block.get("id"))):
        raise invalid(f"{place}.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'")


def _check_pairs(rows: list[list[Block]]) -> None:
    for number, row in enumerate(rows):
        asked = {block["id"] for block in row if block["type"] == "tool_use"}
        following = rows[number + 1] if number + 1 < len(rows) else []
        answered = {block["tool_use_id"] for block in following if block["type"] == "tool_result"}
        if asked - answered:
            raise invalid(
                f"messages.{number}: `tool_use` ids were found without `tool_result` blocks "
                f"immediately after: {', '.join(sorted(asked - answered))}."
            )
        if answered - asked:
            raise invalid(
                f"messages.{number + 1}.content: unexpected `tool_use_id` found in `tool_result` "
                f"blocks: {', '.join(sorted(answered - asked))}."
            )
    if any(block["type"] == "tool_result" for block in rows[0]):
        raise invalid("messages.0.content: unexpected `tool_use_id` found in `tool_result` blocks")


def _check_last_turn(body: Mapping[str, Any], rows: list[list[Block]]) -> None:
    """A turn that has called tools and goes on begins with its thinking, where that is enabled."""
    if (body.get("thinking") or {}).get("type") != "enabled":
        return
    roles = [row["role"] for row in body["messages"]]
    said = [number for number, role in enumerate(roles) if role == "assistant"]
    if not said:
        return
    after = rows[said[-1] + 1] if said[-1] + 1 < len(rows) else []
    if not any(block["type"] == "tool_result" for block in after):
        return
    first = rows[said[-1]][0]["type"]
    if first not in THOUGHTS:
        raise invalid(
            f"messages.{said[-1]}.content.0.type: Expected `thinking` or `redacted_thinking`, but "
            f"found `{first}`. When `thinking` is enabled, a final `assistant` message must start "
            "with a thinking block (preceeding the lastmost set of `tool_use` and `tool_result` "
            "blocks)."
        )


def _check_tools(tools: list[Block]) -> None:
    names = [tool.get("name") for tool in tools]
    if len(set(names)) != len(names):
        raise invalid("tools: Tool names must be unique.")
    for number, tool in enumerate(tools):
        if tool.get("type") in (None, "custom") and not isinstance(tool.get("input_schema"), dict):
            raise invalid(f"tools.{number}.custom.input_schema: Field required")


def _marks(value: Any) -> Iterator[Any]:
    """Yield every `cache_control` in `value` that says something."""
    if isinstance(value, dict):
        if value.get("cache_control"):
            yield value["cache_control"]
        value = [each for name, each in value.items() if name != "cache_control"]
    if isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from _marks(each)

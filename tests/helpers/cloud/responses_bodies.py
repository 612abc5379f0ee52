"""Checks bodies of OpenAI's Responses as the real service does: its own items, unchanged."""

from collections.abc import Mapping
from typing import Any, Final

from openai.types.responses import response_create_params

from tests.helpers.cloud.cloud_answers import CloudError, RefusedBodyError, invalid
from tests.helpers.cloud.cloud_memory import CloudMemory

FIELDS: Final = {"stream", *response_create_params.ResponseCreateParamsBase.__annotations__}
_TOLD: Final = {"id", "type", "status"}
ITEM_FIELDS: Final = {
    "message": _TOLD | {"role", "content", "phase"},
    "reasoning": _TOLD | {"summary", "content", "encrypted_content"},
    "function_call": _TOLD | {"call_id", "name", "arguments", "namespace", "caller"},
    "function_call_output": _TOLD | {"call_id", "output", "caller", "namespace"},
    "custom_tool_call": _TOLD | {"call_id", "name", "input", "namespace", "caller"},
    "custom_tool_call_output": _TOLD | {"call_id", "output", "caller"},
    "item_reference": {"id", "type"},
}
CALLS: Final = ("function_call", "custom_tool_call")
PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}


def check_responses(body: Mapping[str, Any], memory: CloudMemory) -> list[dict[str, Any]]:
    """Return all items of the prompt, with those that the body refers to.

    Raises: RefusedBodyError.
    """
    for name in body:
        if name not in FIELDS:
            raise invalid(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
    before = _items_before(body.get("previous_response_id"), memory)
    given = body.get("input")
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise invalid("Missing required parameter: 'input'.", "input", "missing_required_parameter")
    items = [_checked(f"input[{n}]", item, memory) for n, item in enumerate(given)]
    _check_pairs([*before, *items])
    _check_company(items, memory)
    return [*before, *items]


def _items_before(response_id: object, memory: CloudMemory) -> list[dict[str, Any]]:
    if response_id is None:
        return []
    if str(response_id) not in memory.responses:
        text = f"Previous response with id '{response_id}' not found."
        raise invalid(text, "previous_response_id", "previous_response_not_found")
    return memory.responses[str(response_id)]


def _checked(place: str, item: Mapping[str, Any], memory: CloudMemory) -> dict[str, Any]:
    kind = str(item.get("type", "message"))
    if kind not in ITEM_FIELDS:
        raise invalid(f"Invalid value: '{kind}'.", f"{place}.type", "invalid_value")
    for name in item:
        if name not in ITEM_FIELDS[kind]:
            raise invalid(f"Unknown parameter: '{place}.{name}'.", place, "unknown_parameter")
    if kind == "message":
        _check_message(place, item)
    if item.get("id") is not None:
        _check_id(place, kind, str(item["id"]), item, memory)
    if kind == "reasoning":
        _check_reasoning(place, item, memory)
    if kind == "item_reference":
        return memory.items[str(item["id"])].item
    return {"type": kind, **item}


def _check_message(place: str, item: Mapping[str, Any]) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise invalid(f"Invalid value: '{role}'.", f"{place}.role", "invalid_value")
    said = ("output_text", "refusal")
    known = said if role == "assistant" else ("input_text", "input_image", "input_file")
    for part in content if isinstance(content, list) else []:
        if part.get("type") not in known:
            text = f"Invalid value: '{part.get('type')}'. Supported values are: {known}."
            raise invalid(text, f"{place}.content", "invalid_value")


def _check_id(
    place: str, kind: str, name: str, item: Mapping[str, Any], memory: CloudMemory
) -> None:
    prefix = PREFIXES.get(kind)
    if prefix is not None and not name.startswith(prefix):
        text = f"Invalid '{place}.id': '{name}'. Expected an ID that begins with '{prefix}'."
        raise invalid(text, f"{place}.id", "invalid_value")
    is_clients = kind == "message" and item.get("role") != "assistant"
    if is_clients or kind.endswith("_output"):
        return  # clients name what they say themselves: Codex does
    stored = memory.items.get(name)
    has_content = "encrypted_content" in item or kind not in ("reasoning", "item_reference")
    if stored is None or not (stored.is_stored or has_content):
        text = f"Item with id '{name}' not found."
        if stored is not None:
            text += " Items are not persisted when `store` is set to false."
        raise RefusedBodyError(CloudError(404, text, param="input"))


def _check_reasoning(place: str, item: Mapping[str, Any], memory: CloudMemory) -> None:
    blob = item.get("encrypted_content")
    if blob is not None and memory.opened(blob) is None:
        text = f"The encrypted content {str(blob)[:4]}... could not be verified."
        raise invalid(text, f"{place}.encrypted_content", "invalid_encrypted_content")
    if blob is None and item.get("id") is None:
        raise invalid(f"Missing required parameter: '{place}.id'.", f"{place}.id")


def _check_pairs(items: list[dict[str, Any]]) -> None:
    """Each call has an output, and each output a call before it."""
    called: set[str] = set()
    answered: set[str] = set()
    for item in items:
        if item["type"] in CALLS:
            called.add(item["call_id"])
        elif item["type"].endswith("_output"):
            if item["call_id"] not in called:
                text = (
                    f"No tool call found for function call output with call_id {item['call_id']}."
                )
                raise invalid(text, "input")
            answered.add(item["call_id"])
    if called - answered:
        missing = sorted(called - answered)[0]
        raise invalid(f"No tool output found for function call {missing}.", "input")


def _check_company(items: list[dict[str, Any]], memory: CloudMemory) -> None:
    """What was written after reasoning comes with it, and reasoning with what it led to."""
    seen = {item["id"] for item in items if item["type"] == "reasoning" and item.get("id")}
    for number, item in enumerate(items):
        stored = memory.items.get(str(item.get("id")))
        if stored is not None and stored.needs is not None and stored.needs not in seen:
            raise invalid(
                f"Item '{item['id']}' of type '{item['type']}' was provided without its required "
                f"'reasoning' item: '{stored.needs}'.",
                "input",
            )
        is_mine = item["type"] == "reasoning"
        after = items[number + 1] if number + 1 < len(items) else {"type": "none"}
        is_written = after["type"] in (*CALLS, "reasoning") or after.get("role") == "assistant"
        if is_mine and not is_written:
            raise invalid(
                f"Item '{item.get('id')}' of type 'reasoning' was provided without its required "
                "following item.",
                "input",
            )

"""Tools of every dialect, as one shape: {"type": "function", "function": {name, description, ...}}.

The client's order of tools is kept; each tool's outer keys come in one order, so that the same
tools render to the same tokens.
"""

from typing import Any, Final

from proxy.dialects import fields
from proxy.strict_json import parse_argument
from shared.errors import RequestError

NAME_CHARS_MAX: Final = 256
_FREE_TEXT: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def function_tool(
    row: dict[str, Any], param: str, *, schema: str = "parameters", inner: str = ""
) -> dict[str, Any]:
    """Return the tool that `row` declares; `schema` names its field with the JSON schema.

    Raises:
        RequestError: it has no name, or its schema is not an object.
    """
    prefix = f"{param}.{inner}" if inner else param
    name = fields.required_text(row, "name", f"{prefix}.name")
    if len(name) > NAME_CHARS_MAX:
        fields.refuse(f"{prefix}.name", name, f"up to {NAME_CHARS_MAX} characters")
    function: dict[str, Any] = {"name": name}
    description = fields.text(row, "description", f"{prefix}.description")
    if description is not None:
        function["description"] = description
    parameters = row.get(schema)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    function["parameters"] = fields.record(parameters, f"{prefix}.{schema}")
    return {"type": "function", "function": function}


def custom_tool(row: dict[str, Any], param: str) -> dict[str, Any]:
    """Return a tool that takes free text as a function with one string."""
    plain = {key: row.get(key) for key in ("name", "description")}
    return function_tool(plain | {"parameters": _FREE_TEXT}, param)


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return an assistant's call; `arguments` becomes an object where it is the text of one.

    A text that is not JSON stays a text: the model wrote it, and it is what the model must see.
    """
    if type(arguments) is str:
        parsed = parse_argument(arguments) if arguments.strip() else {}
        arguments = arguments if parsed is None else parsed
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def refuse_forced_choice(choice: Any, forced: frozenset[str]) -> bool:
    """Return whether tools may be shown to the model at all: not under the choice "none".

    Raises:
        RequestError: the choice is not one of the API's, or one that needs constrained decoding.
    """
    if choice is None:
        return True
    kind = choice.get("type") if type(choice) is dict else choice
    if kind == "none":
        return False
    if kind == "auto":
        return True
    if type(kind) is str and kind in forced:
        raise RequestError(
            f"tool_choice {kind!r} is not supported: this server can not force a call. "
            "Allowed are 'auto' and 'none'.",
            code="unsupported_parameter",
            param="tool_choice",
        )
    fields.refuse("tool_choice", choice, "'auto' or 'none'")


def refuse_images(param: str, kind: str) -> None:
    """Raise where a content part of type `kind` is something that a text model cannot read."""
    if "image" in kind or "audio" in kind or "video" in kind:
        raise RequestError(
            f"{param} is of type {kind!r}; this model takes text only. Remove it.",
            code="unsupported_content",
            param=param,
        )

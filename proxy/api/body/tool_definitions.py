"""Gives the tools of every dialect one shape: {"type": "function", "function": {name, ...}}.

A tool has what its client says of it, in the client's order: nothing is filled in.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import orjson

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.body.message_content import note_left_out
from hearth.proxy.http.strict_json import parse_argument
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints

NAME_CHARS_MAX: Final = 256
GRAMMAR_CHARS_MAX: Final = 8_192  # of a custom tool's grammar, in its description
FREE_TEXT: Final = "input"  # a custom tool's one argument, as the model sees it
MODES: Final = ("none", "auto", "required")
_MARKS: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\],]', re.DOTALL)  # of JSON; strings whole
_FOR_SERVERS: Final = ("defer_loading", "cache_control")
_VERSION: Final = re.compile(r"(_preview)?([_-]\d{4}[_-]?\d\d[_-]?\d\d)?$")  # of a hosted tool
_FREE_TEXT_SCHEMA: Final = {
    "type": "object",
    "properties": {FREE_TEXT: {"type": "string"}},
    "required": [FREE_TEXT],
}


# ---------------------------------------------------------------- what the client offers


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
    if row.get(schema) is not None:
        function["parameters"] = fields.record(row[schema], f"{prefix}.{schema}")
    return {"type": "function", "function": function}


def as_sent(row: dict[str, Any]) -> dict[str, Any]:
    """Return `row` without the fields that tell a server how to keep the tool."""
    return {key: value for key, value in row.items() if key not in _FOR_SERVERS}


def custom_tool(row: dict[str, Any], param: str) -> dict[str, Any]:
    """Return a tool that takes free text as a function with one string.

    Its grammar is told to the model, not enforced: the text is a string within JSON.
    """
    texts = [fields.text(row, "description", f"{param}.description") or ""]
    if grammar := _grammar(row, param):
        texts.append(grammar)
    shown = {"description": "\n\n".join(text for text in texts if text)} if any(texts) else {}
    return function_tool({"name": row.get("name"), "parameters": _FREE_TEXT_SCHEMA} | shown, param)


def _grammar(row: dict[str, Any], param: str) -> str:
    """Return what a model is told of a custom tool's format: flat in Responses, nested in chat."""
    shape = fields.optional_record(row, "format")
    if shape.get("type") != "grammar":
        return ""
    if shape.get("grammar") is not None:
        shape = fields.record(shape["grammar"], f"{param}.format.grammar")
    definition = fields.text(shape, "definition", f"{param}.format.definition") or ""
    syntax = fields.text(shape, "syntax", f"{param}.format.syntax") or "lark"
    if len(definition) > GRAMMAR_CHARS_MAX:
        definition = f"{definition[:GRAMMAR_CHARS_MAX]}\n..."
    return f"The {FREE_TEXT} has to match this {syntax} grammar:\n{definition}"


# ---------------------------------------------------------------- which of them may be called


def openai_choice(
    value: Any, shown: Mapping[str, list[str]], dropped: Collection[str] = ()
) -> Constraints:
    """Return a `tool_choice` of either OpenAI dialect: what may be called, and what has to be.

    `shown` has, for each name that the client may choose by, the names that the model sees;
    `dropped` the types of the tools that are left out.

    Raises:
        RequestError: the choice is not one of the API's, or of a tool that is not there.
    """
    if value is None:
        return Constraints()
    row = {"type": value} if type(value) is str else fields.record(value, "tool_choice")
    kind = row.get("type")
    if kind in MODES:
        return _checked(Constraints(str(kind)), shown, dropped)
    if kind == "allowed_tools":
        return _allowed(row, shown)
    if kind in ("function", "custom"):
        name = _chosen_name(row, "tool_choice")
        if name not in shown and _is_dropped(name, dropped):
            return _left_out(name)
        return Constraints("required", _named(name, "tool_choice.name", shown))
    if type(kind) is str and _is_dropped(kind, dropped):
        return _left_out(kind)
    fields.refuse(
        "tool_choice",
        value,
        "none, auto, required, a function, a custom tool or allowed_tools; hosted tools are not "
        "run here",
    )


def _left_out(chosen: str) -> Constraints:
    """Return the choice that is left where a client chose what is not run here: no call at all.

    A client that sends a search of the web as a request of its own can't take one back.
    """
    note_left_out((f"tool_choice {chosen}",))
    return Constraints("none")


def _is_dropped(kind: str, dropped: Collection[str]) -> bool:
    """Return whether a tool of `kind` was left out, in whatever version of it."""
    return _VERSION.sub("", kind) in {_VERSION.sub("", each) for each in dropped}


def _checked(
    choice: Constraints, offered: Collection[str], dropped: Collection[str] = ()
) -> Constraints:
    """Return `choice`; where a call is required and all tools are `dropped`, that of none.

    Raises:
        RequestError: a call is required and no tool was ever there.
    """
    if choice.tool_choice != "required" or offered:
        return choice
    if dropped:
        return _left_out(choice.tool_choice)
    raise RequestError(
        "tool_choice requires a call, and tools holds none that could be called here.",
        code="invalid_tool_choice",
        param="tool_choice",
    )


def _named(name: str, param: str, shown: Mapping[str, list[str]]) -> list[str]:
    """Return the names that the model sees for the tool that a client calls `name`.

    Raises:
        RequestError: there is none.
    """
    if name not in shown:
        raise RequestError(
            f"{param} names {name!r:.80}, which is not in tools.",
            code="invalid_tool_choice",
            param=param,
        )
    return shown[name]


def _chosen_name(row: dict[str, Any], param: str) -> str:
    kind = str(row["type"])
    inner = row if row.get(kind) is None else fields.record(row[kind], f"{param}.{kind}")
    return fields.required_text(inner, "name", f"{param}.name")


def _allowed(row: dict[str, Any], shown: Mapping[str, list[str]]) -> Constraints:
    """Return the choice among some tools; those that are hosted elsewhere are never called."""
    inner = row
    if row.get("allowed_tools") is not None:
        inner = fields.record(row["allowed_tools"], "tool_choice.allowed_tools")
    mode = inner.get("mode", "auto")
    if mode not in ("auto", "required"):
        fields.refuse("tool_choice.mode", mode, "auto or required")
    names: list[str] = []
    hosted: list[str] = []
    for tool, param in fields.records(inner.get("tools"), "tool_choice.tools"):
        if tool.get("type") in ("function", "custom"):
            names += _named(_chosen_name(tool, param), f"{param}.name", shown)
        else:
            hosted.append(str(tool.get("type")))
    if not names and mode == "auto":
        return Constraints("none")
    return _checked(Constraints(mode, names), names, hosted)


# ---------------------------------------------------------------- calls


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return an assistant's call; `arguments` becomes an object where it is the text of one.

    A text that is not JSON stays a text: the model wrote it, and it is what the model must see. So
    does one with digits that 64 bits, or Python, would have otherwise.
    """
    if type(arguments) is str:
        parsed = parse_argument(arguments) if arguments.strip() else {}
        arguments = arguments if parsed is None else parsed
    arguments = getattr(arguments, "text", arguments)  # of a WrittenObject
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def whole_object(text: str) -> dict[str, Any] | None:
    """Return the object that a call's arguments are; None where they are cut off."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if type(value) is dict else None


def as_written(text: str) -> orjson.Fragment | None:
    """Return the object that a call's arguments are, with the digits that were written; or None.

    A number that was read would be a float's: 6.02214076e23 and 2**64 are others there.
    """
    return None if whole_object(text) is None else orjson.Fragment(text.replace("\n", " "))


def whole_pairs(text: str) -> orjson.Fragment | dict[str, Any]:
    """Return the object that a call's arguments are, or what is whole of one that was cut off.

    Only pairs with a comma behind them are sure to be whole: 12 may have been going to be 1234.
    """
    depth, comma = 0, 0  # the last comma between pairs of the outermost object
    for found in _MARKS.finditer(text):
        mark = found[0]
        if mark == "," and depth == 1:
            comma = found.start()
        depth += (mark in ("{", "[")) - (mark in ("}", "]"))
    return as_written(text) or (comma and as_written(text[:comma] + "}")) or {}


def free_text(arguments: str) -> str:
    """Return the text that a custom tool is called with; "" where the call was cut off.

    A model that names the one argument otherwise means the same.
    """
    given = whole_object(arguments) or {}
    if FREE_TEXT not in given and len(given) == 1:
        given = {FREE_TEXT: next(iter(given.values()))}
    found = given.get(FREE_TEXT)
    return found if type(found) is str else ""

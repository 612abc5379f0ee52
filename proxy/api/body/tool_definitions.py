"""Gives the tools of every dialect one shape: {"type": "function", "function": {name, ...}}.

A tool keeps the fields that its client sent, in the client's order; no default is filled in.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import orjson

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.body.message_content import log_left_out
from hearth.proxy.http.strict_json import parse_argument
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints

NAME_CHARS_MAX: Final = 256
GRAMMAR_CHARS_MAX: Final = 8_192  # longest grammar in a custom tool's description
FREE_TEXT: Final = "input"  # name of a custom tool's only argument, as the model sees it
MODES: Final = ("none", "auto", "required")
# Strings, brackets and commas of JSON.
_MARKS: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\],]', re.DOTALL)
_FOR_SERVERS: Final = ("defer_loading", "cache_control")
# The version at the end of a hosted tool's type.
_VERSION: Final = re.compile(r"(_preview)?([_-]\d{4}[_-]?\d\d[_-]?\d\d)?$")
_FREE_TEXT_SCHEMA: Final = {
    "type": "object",
    "properties": {FREE_TEXT: {"type": "string"}},
    "required": [FREE_TEXT],
}


# ---------------------------------------------------------------- tools


def function_tool(
    declared: dict[str, Any], param: str, *, schema: str = "parameters", inner: str = ""
) -> dict[str, Any]:
    """Return the tool in `declared`; `schema` names the field with the JSON schema.

    Raises:
        RequestError: the tool has no name, or its schema is not an object.
    """
    prefix = f"{param}.{inner}" if inner else param
    name = fields.required_text(declared, "name", f"{prefix}.name")
    if len(name) > NAME_CHARS_MAX:
        fields.refuse(f"{prefix}.name", name, f"up to {NAME_CHARS_MAX} characters")
    function: dict[str, Any] = {"name": name}
    description = fields.text(declared, "description", f"{prefix}.description")
    if description is not None:
        function["description"] = description
    if declared.get(schema) is not None:
        function["parameters"] = fields.json_object(declared[schema], f"{prefix}.{schema}")
    return {"type": "function", "function": function}


def without_server_fields(declared: dict[str, Any]) -> dict[str, Any]:
    """Return `declared` without the fields that only say how a server keeps the tool."""
    return {name: value for name, value in declared.items() if name not in _FOR_SERVERS}


def custom_tool(declared: dict[str, Any], param: str) -> dict[str, Any]:
    """Return a tool that takes free text, as a function with one string argument.

    The description shows the tool's grammar to the model. The grammar is not enforced, as the text
    is a string inside JSON.
    """
    texts = [fields.text(declared, "description", f"{param}.description") or ""]
    if grammar := _grammar(declared, param):
        texts.append(grammar)
    description = {"description": "\n\n".join(text for text in texts if text)} if any(texts) else {}
    return function_tool(
        {"name": declared.get("name"), "parameters": _FREE_TEXT_SCHEMA} | description, param
    )


def _grammar(declared: dict[str, Any], param: str) -> str:
    """Return the text that shows a custom tool's grammar; chat nests it one level deeper."""
    tool_format = fields.optional_object(declared, "format")
    if tool_format.get("type") != "grammar":
        return ""
    if tool_format.get("grammar") is not None:
        tool_format = fields.json_object(tool_format["grammar"], f"{param}.format.grammar")
    definition = fields.text(tool_format, "definition", f"{param}.format.definition") or ""
    syntax = fields.text(tool_format, "syntax", f"{param}.format.syntax") or "lark"
    if len(definition) > GRAMMAR_CHARS_MAX:
        definition = f"{definition[:GRAMMAR_CHARS_MAX]}\n..."
    return f"The {FREE_TEXT} has to match this {syntax} grammar:\n{definition}"


# ---------------------------------------------------------------- tool_choice


def read_tool_choice(
    value: Any, shown_names: Mapping[str, list[str]], dropped: Collection[str] = ()
) -> Constraints:
    """Return which tools an OpenAI `tool_choice` allows, and whether it requires a call.

    `shown_names` maps each name that the client may choose to the names that the model sees.
    `dropped` has the types of the tools that were left out.

    Raises:
        RequestError: the choice is not one of the API's, or names a tool that is not in `tools`.
    """
    if value is None:
        return Constraints()
    choice = {"type": value} if type(value) is str else fields.json_object(value, "tool_choice")
    kind = choice.get("type")
    if kind in MODES:
        return _checked(Constraints(str(kind)), shown_names, dropped)
    if kind == "allowed_tools":
        return _allowed_tools(choice, shown_names)
    if kind in ("function", "custom"):
        name = _chosen_name(choice, "tool_choice")
        if name not in shown_names and _is_dropped(name, dropped):
            return _no_call(name)
        return Constraints("required", _names_for_model(name, "tool_choice.name", shown_names))
    if type(kind) is str and _is_dropped(kind, dropped):
        return _no_call(kind)
    fields.refuse(
        "tool_choice",
        value,
        "none, auto, required, a function, a custom tool or allowed_tools; hosted tools are not "
        "run here",
    )


def _no_call(chosen: str) -> Constraints:
    """Return a ban on calls, for a client that chose a tool which this server does not run.

    Clients send a web search as a separate request, and a refusal would stop them.
    """
    log_left_out((f"tool_choice {chosen}",))
    return Constraints("none")


def _is_dropped(kind: str, dropped: Collection[str]) -> bool:
    """Return whether a tool of type `kind`, in any version, was left out."""
    return _VERSION.sub("", kind) in {_VERSION.sub("", dropped_kind) for dropped_kind in dropped}


def _checked(
    choice: Constraints, offered: Collection[str], dropped: Collection[str] = ()
) -> Constraints:
    """Return `choice`, or a ban on calls if a call is required and all tools are dropped.

    Raises:
        RequestError: a call is required and the request has no tools.
    """
    if choice.tool_choice != "required" or offered:
        return choice
    if dropped:
        return _no_call(choice.tool_choice)
    raise RequestError(
        "tool_choice requires a call, and tools holds none that could be called here.",
        code="invalid_tool_choice",
        param="tool_choice",
    )


def _names_for_model(name: str, param: str, shown_names: Mapping[str, list[str]]) -> list[str]:
    """Return the names under which the model sees the client's tool `name`.

    Raises:
        RequestError: the request has no such tool.
    """
    if name not in shown_names:
        raise RequestError(
            f"{param} names {name!r:.80}, which is not in tools.",
            code="invalid_tool_choice",
            param=param,
        )
    return shown_names[name]


def _chosen_name(choice: dict[str, Any], param: str) -> str:
    kind = str(choice["type"])
    inner = (
        choice if choice.get(kind) is None else fields.json_object(choice[kind], f"{param}.{kind}")
    )
    return fields.required_text(inner, "name", f"{param}.name")


def _allowed_tools(choice: dict[str, Any], shown_names: Mapping[str, list[str]]) -> Constraints:
    """Return the choice among some of the tools; hosted tools among them are never called."""
    inner = choice
    if choice.get("allowed_tools") is not None:
        inner = fields.json_object(choice["allowed_tools"], "tool_choice.allowed_tools")
    mode = inner.get("mode", "auto")
    if mode not in ("auto", "required"):
        fields.refuse("tool_choice.mode", mode, "auto or required")
    names: list[str] = []
    hosted: list[str] = []
    for tool, param in fields.json_objects(inner.get("tools"), "tool_choice.tools"):
        if tool.get("type") in ("function", "custom"):
            names += _names_for_model(_chosen_name(tool, param), f"{param}.name", shown_names)
        else:
            hosted.append(str(tool.get("type")))
    if not names and mode == "auto":
        return Constraints("none")
    return _checked(Constraints(mode, names), names, hosted)


# ---------------------------------------------------------------- calls


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return an assistant's call; `arguments` that are the JSON of an object become that object.

    A text that is not JSON stays a text, as the model must see what it wrote. So does JSON with
    numbers whose digits would change in 64 bits or in Python.
    """
    if type(arguments) is str:
        parsed = parse_argument(arguments) if arguments.strip() else {}
        arguments = arguments if parsed is None else parsed
    arguments = getattr(arguments, "text", arguments)  # the text of a WrittenObject
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def parsed_object(text: str) -> dict[str, Any] | None:
    """Return the object in the text of a call's arguments; None if the text is cut off."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if type(value) is dict else None


def object_fragment(text: str) -> orjson.Fragment | None:
    """Return the object in the text of a call's arguments with its digits unchanged, or None.

    Parsed numbers would become floats, which change 6.02214076e23 and 2**64.
    """
    return None if parsed_object(text) is None else orjson.Fragment(text.replace("\n", " "))


def complete_pairs(text: str) -> orjson.Fragment | dict[str, Any]:
    """Return the object in the text of a call's arguments, or its complete pairs if it was cut off.

    A pair is surely complete only if a comma follows: a final 12 may be the start of 1234.
    """
    depth, comma = 0, 0  # `comma`: position of the last comma in the outermost object
    for match in _MARKS.finditer(text):
        mark = match[0]
        if mark == "," and depth == 1:
            comma = match.start()
        depth += (mark in ("{", "[")) - (mark in ("}", "]"))
    return object_fragment(text) or (comma and object_fragment(text[:comma] + "}")) or {}


def free_text(arguments: str) -> str:
    """Return the text in a custom tool's call; "" if the call was cut off.

    A model may give the only argument another name.
    """
    pairs = parsed_object(arguments) or {}
    if FREE_TEXT not in pairs and len(pairs) == 1:
        pairs = {FREE_TEXT: next(iter(pairs.values()))}
    text = pairs.get(FREE_TEXT)
    return text if type(text) is str else ""

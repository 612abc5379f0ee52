"""Parses Anthropic's tools and tool_choice.

Tools that Anthropic defines and the client runs (bash, text editor, memory) come without a schema,
as Anthropic's models know the tools. Here each such tool becomes a function with the arguments that
clients read. Hosted tools are left out, and so is computer use, which needs images.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.proxy.api.body import field_readers as fields, tool_definitions as tools
from hearth.shared.wire_messages import Constraints

_HOSTED_SEARCH: Final = "tool_search_tool"


@dataclass(slots=True)
class MessagesTools:
    """The tools of one request, in the client's order."""

    shown: list[Any] = field(default_factory=list)
    deferred: list[Any] = field(default_factory=list)  # shown once a message loads them
    dropped: list[str] = field(default_factory=list)  # types of the tools that are left out
    dropped_names: list[str] = field(default_factory=list)  # names of these tools; "" = none

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in (*self.shown, *self.deferred)]

    def add(self, declared: dict[str, Any], param: str, *, late: bool = False) -> str:
        """Add one tool and return its name; "" if the tool is left out.

        Raises:
            RequestError: the tool is malformed.
        """
        kind = fields.text(declared, "type", f"{param}.type")
        if kind in (None, "custom"):
            tool = tools.function_tool(declared, param, schema="input_schema")
        elif known := [tool for begin, tool in _CLIENT_TOOLS if kind.startswith(begin)]:
            description, schema = known[0]  # a tool that Anthropic defines and the client runs
            function = {
                "name": declared.get("name"),
                "description": description,
                "parameters": schema,
            }
            tool = tools.function_tool(function, param)
        else:
            self.dropped.append(kind)
            self.dropped_names.append(fields.text(declared, "name", f"{param}.name") or "")
            return ""
        is_late = fields.boolean(declared, "defer_loading") or late
        (self.deferred if is_late else self.shown).append(tool)
        name: str = tool["function"]["name"]
        return name


def read_tools(body: dict[str, Any]) -> MessagesTools:
    """Return the tools of `body`.

    Raises:
        RequestError: a tool is malformed.
    """
    offered = MessagesTools()
    for declared, param in fields.json_objects(fields.optional_list(body, "tools"), "tools"):
        offered.add(declared, param)
    if any(kind.startswith(_HOSTED_SEARCH) for kind in offered.dropped):
        # The tool search is not run here, so nothing would load the deferred tools.
        offered.shown, offered.deferred = offered.shown + offered.deferred, []
    return offered


def read_choice(body: dict[str, Any], request_tools: MessagesTools) -> Constraints:
    """Return which tools the `tool_choice` of `body` allows.

    Raises:
        RequestError: the choice is not one of the API's, or names a tool that is not in `tools`.
    """
    raw_choice = fields.optional_object(body, "tool_choice")
    kind = raw_choice.get("type", "auto")
    parallel = not fields.boolean(raw_choice, "disable_parallel_tool_use")
    if kind not in ("auto", "any", "tool", "none"):
        fields.refuse("tool_choice.type", kind, "auto, any, tool or none")
    chosen_tool = {"type": "function", "name": raw_choice.get("name")}
    choice = tools.read_tool_choice(
        {"any": "required", "tool": chosen_tool}.get(kind, kind),
        {name: [name] for name in request_tools.names},
        [*request_tools.dropped, *request_tools.dropped_names],
    )
    return dataclasses.replace(choice, parallel_calls=parallel)


def _schema(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _text(description: str, *choices: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "description": description}
    return schema | {"enum": list(choices)} if choices else schema


_EDITS: Final = {
    "path": _text("Absolute path of the file or directory."),
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "For view: the first and last line to show, from 1; -1 is the end.",
    },
    "file_text": _text("For create: what the file is to hold."),
    "old_str": _text("For str_replace: the text to replace, exactly as in the file and once only."),
    "new_str": _text("For str_replace: what replaces it."),
    "insert_line": {"type": "integer", "description": "For insert: the line to insert behind."},
}
_CLIENT_TOOLS: Final[tuple[tuple[str, tuple[str, dict[str, Any]]], ...]] = (
    (
        "bash_20",
        (
            "Run a command in a bash shell that stays open between calls.",
            _schema(
                [],
                command=_text("The command to run."),
                restart={"type": "boolean", "description": "True restarts the shell instead."},
            ),
        ),
    ),
    (
        "text_editor_20",
        (
            "View, create and edit text files.",
            _schema(
                ["command", "path"],
                command=_text("What to do.", "view", "create", "str_replace", "insert"),
                **_EDITS,
                insert_text=_text("For insert: the text."),
            ),
        ),
    ),
    (
        "memory_20",
        (
            "Keep notes in files under /memories, which outlive this conversation.",
            _schema(
                ["command"],
                command=_text(
                    "What to do.", "view", "create", "str_replace", "insert", "delete", "rename"
                ),
                **_EDITS,
                insert_text=_text("For insert: the text."),
                old_path=_text("For rename: the path now."),
                new_path=_text("For rename: the path then."),
            ),
        ),
    ),
)

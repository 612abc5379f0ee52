"""Turns Anthropic's tools and tool_choice into our tools and what of them may be called.

Tools that Anthropic defines and the client runs (bash, text editor, memory) carry no schema: the
model of their maker knows them. Here they are shown as functions with the arguments that the
client's side of them reads. Hosted tools are left out, and so is computer use: it needs images.
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
    deferred: list[Any] = field(default_factory=list)  # shown where they are loaded
    dropped: list[str] = field(default_factory=list)  # types of those that are left out
    dropped_names: list[str] = field(default_factory=list)  # of those that have one

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in (*self.shown, *self.deferred)]

    def add(self, row: dict[str, Any], param: str, *, late: bool = False) -> str:
        """Take in one tool and return its name; "" where it is left out.

        Raises:
            RequestError: it is none.
        """
        kind = fields.text(row, "type", f"{param}.type")
        if kind in (None, "custom"):
            tool = tools.function_tool(row, param, schema="input_schema")
        elif known := [tool for begin, tool in _CLIENT_TOOLS if kind.startswith(begin)]:
            description, schema = known[0]  # of a tool that the client runs
            shown = {"name": row.get("name"), "description": description, "parameters": schema}
            tool = tools.function_tool(shown, param)
        else:
            self.dropped.append(kind)
            self.dropped_names.append(fields.text(row, "name", f"{param}.name") or "")
            return ""
        is_late = fields.boolean(row, "defer_loading") or late
        (self.deferred if is_late else self.shown).append(tool)
        name: str = tool["function"]["name"]
        return name


def read_tools(body: dict[str, Any]) -> MessagesTools:
    """Return the tools of `body`.

    Raises:
        RequestError: one of them is none.
    """
    found = MessagesTools()
    for row, param in fields.records(fields.optional_rows(body, "tools"), "tools"):
        found.add(row, param)
    if any(kind.startswith(_HOSTED_SEARCH) for kind in found.dropped):
        # Nobody is left to load what waits for the search.
        found.shown, found.deferred = found.shown + found.deferred, []
    return found


def read_choice(body: dict[str, Any], found: MessagesTools) -> Constraints:
    """Return what `body` says may be called, and whether by several calls in one turn.

    Raises:
        RequestError: it is not one of the API's choices, or of a tool that is not there.
    """
    row = fields.optional_record(body, "tool_choice")
    kind = row.get("type", "auto")
    parallel = not fields.boolean(row, "disable_parallel_tool_use")
    if kind not in ("auto", "any", "tool", "none"):
        fields.refuse("tool_choice.type", kind, "auto, any, tool or none")
    named = {"type": "function", "name": row.get("name")}
    choice = tools.openai_choice(
        {"any": "required", "tool": named}.get(kind, kind),
        {name: [name] for name in found.names},
        [*found.dropped, *found.dropped_names],
    )
    return dataclasses.replace(choice, parallel_calls=parallel)


def _schema(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _text(description: str, *choices: str) -> dict[str, Any]:
    shape: dict[str, Any] = {"type": "string", "description": description}
    return shape | {"enum": list(choices)} if choices else shape


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

"""Names the tools of a Responses request for the model, and finds the client's tool for a call.

The model sees a function in a namespace as `namespace__name`, a custom tool as a function with one
string argument, and the client's search for deferred tools as the function `tool_search`. A call is
sent to the client under the tool's own name and kind.
"""

from dataclasses import dataclass
from typing import Any, Final

from hearth.proxy.api.body import field_readers as fields, tool_definitions as tools

SEARCH: Final = "tool_search"
LOADING: Final = ("tool_search_output", "additional_tools")  # types of items that load tools
_JOINT: Final = "__"


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """A tool as the client knows it."""

    kind: str  # "function" | "custom" | "tool_search"
    name: str
    namespace: str = ""


class ResponsesTools:
    """The tools of one request in the client's order, including tools that its input loads."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.deferred: list[Any] = []  # shown once an item loads them
        self.dropped: list[str] = []  # types of the tools that are left out
        self._origins: dict[str, ToolOrigin] = {}  # by the name that the model sees
        self._names: dict[ToolOrigin, str] = {}
        self._runs_search: bool = False  # whether the client runs the tool search

    @property
    def choosable(self) -> dict[str, list[str]]:
        """Return the names that the model sees, by the name that a tool_choice uses."""
        names: dict[str, list[str]] = {}
        for shown, origin in self._origins.items():
            names.setdefault(origin.name, []).append(shown)
        return names

    def shown_name(self, name: str, namespace: str = "") -> str:
        """Return the model's name for a client's tool, also if the tool is no longer offered."""
        for kind in ("function", "custom"):
            if known := self._names.get(ToolOrigin(kind, name, namespace)):
                return known
        return f"{namespace}{_JOINT}{name}" if namespace else name

    def origin(self, shown: str) -> ToolOrigin:
        """Return the tool behind a name; an unknown name stands for a function of that name."""
        return self._origins.get(shown) or ToolOrigin("function", shown)

    def add(self, declared_tools: list[Any], param: str, *, late: bool = False) -> list[str]:
        """Add tools, and return the names of the callable ones as the model sees them.

        Raises:
            RequestError: a tool is malformed.
        """
        names = []
        for declared, where in fields.json_objects(declared_tools, param):
            kind = fields.required_text(declared, "type", f"{where}.type")
            if kind == "namespace":
                names += self._add_namespace(declared, where, late)
            elif kind in ("function", "custom"):
                names.append(self._add(declared, where, "", late))
            elif kind == SEARCH and declared.get("execution") == "client":
                self._runs_search = True
                tool = tools.function_tool({**declared, "name": SEARCH}, where)
                names.append(self._keep(tool, ToolOrigin(SEARCH, SEARCH), late=False))
            else:
                self.dropped.append(kind)
        return names

    def show_unsearchable(self) -> None:
        """Show deferred tools at once if only a search by the server would load them."""
        if SEARCH in self.dropped and not self._runs_search:
            self.shown, self.deferred = self.shown + self.deferred, []

    def _add_namespace(self, declared: dict[str, Any], where: str, late: bool) -> list[str]:
        namespace = fields.required_text(declared, "name", f"{where}.name")
        description = fields.text(declared, "description", f"{where}.description") or ""
        names = []
        for inner, inner_where in fields.json_objects(declared.get("tools"), f"{where}.tools"):
            if inner.get("type") not in ("function", "custom"):
                self.dropped.append(str(inner.get("type")))
                continue
            if description:  # only the first tool shows the namespace's description
                own = fields.text(inner, "description", f"{inner_where}.description") or ""
                inner = {**inner, "description": f"{description}\n\n{own}".strip()}
                description = ""
            names.append(self._add(inner, inner_where, namespace, late))
        return names

    def _add(self, declared: dict[str, Any], where: str, namespace: str, late: bool) -> str:
        kind = str(declared["type"])
        origin = ToolOrigin(
            kind, fields.required_text(declared, "name", f"{where}.name"), namespace
        )
        read = tools.function_tool if kind == "function" else tools.custom_tool
        is_late = fields.boolean(declared, "defer_loading") or late
        return self._keep(read(declared, where), origin, late=is_late)

    def _keep(self, tool: dict[str, Any], origin: ToolOrigin, *, late: bool) -> str:
        """Add a tool under a unique name, unless it is known already, and return its name."""
        if origin in self._names:
            return self._names[origin]
        prefix = f"{origin.namespace}{_JOINT}" if origin.namespace else ""
        name = f"{prefix}{origin.name}"
        while name in self._origins:
            name += "_"
        self._names[origin], self._origins[name] = name, origin
        tool["function"]["name"] = name
        (self.deferred if late else self.shown).append(tool)
        return name


def responses_tools_of(body: dict[str, Any]) -> ResponsesTools:
    """Return the tools of `body`, including tools that its input loads.

    Raises:
        RequestError: a tool is malformed.
    """
    request_tools = ResponsesTools()
    request_tools.add(fields.optional_list(body, "tools"), "tools")
    request_tools.show_unsearchable()
    items = body.get("input")
    for index, item in enumerate(items if type(items) is list else ()):
        if type(item) is dict and item.get("type") in LOADING:
            param = f"input[{index}].tools"
            loaded_tools = fields.optional_list(item, "tools", param)  # null if a search found none
            request_tools.add(loaded_tools, param, late=True)
    return request_tools

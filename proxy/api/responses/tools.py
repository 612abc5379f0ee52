"""Gives the tools of a Responses request the names that the model sees, and finds them again.

A namespace's function is shown as `namespace__name`, a custom tool as a function of one string, and
the search for deferred tools that the client runs as a function `tool_search`. What the model
calls goes back to the client as what it was.
"""

from dataclasses import dataclass
from typing import Any, Final

from hearth.proxy.api.body import field_readers as fields, tool_definitions as tools

SEARCH: Final = "tool_search"
LOADING: Final = ("tool_search_output", "additional_tools")  # items that bring tools along
_JOINT: Final = "__"


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """A tool as the client knows it."""

    kind: str  # "function" | "custom" | "tool_search"
    name: str
    namespace: str = ""


class ResponsesTools:
    """The tools of one request, in the client's order, those that its input loads included."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.deferred: list[Any] = []  # shown where they are loaded
        self.dropped: list[str] = []  # types of those that are left out
        self._origins: dict[str, ToolOrigin] = {}  # by the name that the model sees
        self._names: dict[ToolOrigin, str] = {}
        self._searches: bool = False  # the client can

    @property
    def choosable(self) -> dict[str, list[str]]:
        """The names that the model sees, by the name that a tool_choice uses."""
        found: dict[str, list[str]] = {}
        for shown, origin in self._origins.items():
            found.setdefault(origin.name, []).append(shown)
        return found

    def shown_name(self, name: str, namespace: str = "") -> str:
        """Return the name under which the model sees, or once saw, a tool of the client."""
        for kind in ("function", "custom"):
            if known := self._names.get(ToolOrigin(kind, name, namespace)):
                return known
        return f"{namespace}{_JOINT}{name}" if namespace else name

    def origin(self, shown: str) -> ToolOrigin:
        """Return what the model calls; a name that it made up is a function of that name."""
        return self._origins.get(shown) or ToolOrigin("function", shown)

    def add(self, rows: list[Any], param: str, *, late: bool = False) -> list[str]:
        """Take tools in, and return the names that the model sees of those that it can call.

        Raises:
            RequestError: one of them is none.
        """
        found = []
        for row, where in fields.records(rows, param):
            kind = fields.required_text(row, "type", f"{where}.type")
            if kind == "namespace":
                found += self._add_namespace(row, where, late)
            elif kind in ("function", "custom"):
                found.append(self._add(row, where, "", late))
            elif kind == SEARCH and row.get("execution") == "client":
                self._searches = True
                tool = tools.function_tool({**row, "name": SEARCH}, where)
                found.append(self._keep(tool, ToolOrigin(SEARCH, SEARCH), late=False))
            else:
                self.dropped.append(kind)
        return found

    def settle(self) -> None:
        """Show at once what only a search by the server could load: there is none here."""
        if SEARCH in self.dropped and not self._searches:
            self.shown, self.deferred = self.shown + self.deferred, []

    def _add_namespace(self, row: dict[str, Any], where: str, late: bool) -> list[str]:
        namespace = fields.required_text(row, "name", f"{where}.name")
        description = fields.text(row, "description", f"{where}.description") or ""
        found = []
        for inner, inner_where in fields.records(row.get("tools"), f"{where}.tools"):
            if inner.get("type") not in ("function", "custom"):
                self.dropped.append(str(inner.get("type")))
                continue
            if description:  # of all of them: told once
                own = fields.text(inner, "description", f"{inner_where}.description") or ""
                inner = {**inner, "description": f"{description}\n\n{own}".strip()}
                description = ""
            found.append(self._add(inner, inner_where, namespace, late))
        return found

    def _add(self, row: dict[str, Any], where: str, namespace: str, late: bool) -> str:
        kind = str(row["type"])
        origin = ToolOrigin(kind, fields.required_text(row, "name", f"{where}.name"), namespace)
        read = tools.function_tool if kind == "function" else tools.custom_tool
        is_late = fields.boolean(row, "defer_loading") or late
        return self._keep(read(row, where), origin, late=is_late)

    def _keep(self, tool: dict[str, Any], origin: ToolOrigin, *, late: bool) -> str:
        """List a tool under a name of its own; one that is known already stays as it is."""
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
    """Return the tools of `body`, and those that its input loads.

    Raises:
        RequestError: one of them is none.
    """
    request_tools = ResponsesTools()
    request_tools.add(fields.optional_rows(body, "tools"), "tools")
    request_tools.settle()
    given = body.get("input")
    for index, item in enumerate(given if type(given) is list else ()):
        if type(item) is dict and item.get("type") in LOADING:
            param = f"input[{index}].tools"
            rows = fields.optional_rows(item, "tools", param)  # none where a search found none
            request_tools.add(rows, param, late=True)
    return request_tools

"""Builds the output items of a response as they grow, and the events about each.

An item gives events as (kind, fields); the writer of the response numbers them and says which item
they are of. `row` is an item's state, which changes until it is closed: `opened` gives the events
that follow the item's own, `closed` those before its end, with the status "completed", or
"incomplete" where the answer broke off amid it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hearth.proxy.api.answer_frames import logprob_rows
from hearth.proxy.api.body import tool_definitions as tools
from hearth.proxy.api.responses.tools import SEARCH, ToolOrigin
from hearth.shared.wire_messages import CallStart, TokenLogprob

OutputEvent = tuple[str, dict[str, Any]]


# ---------------------------------------------------------------- what is said


@dataclass(frozen=True, slots=True)
class _TextKind:
    """The names under which events carry one kind of text."""

    holder: str  # the item's field with its parts
    index: str  # what the events call the place in it
    part_event: str
    text_event: str
    part: Mapping[str, Any]  # one without its text
    has_logprobs: bool = False


_MESSAGE: Final = _TextKind(
    "content",
    "content_index",
    "response.content_part",
    "response.output_text",
    {"type": "output_text", "annotations": []},
    has_logprobs=True,
)
_REASONING: Final = _TextKind(
    "content",
    "content_index",
    "response.content_part",
    "response.reasoning_text",
    {"type": "reasoning_text"},
)
_SUMMARY: Final = _TextKind(
    "summary",
    "summary_index",
    "response.reasoning_summary_part",
    "response.reasoning_summary_text",
    {"type": "summary_text"},
)


class TextItem:
    """A message, or reasoning: one part of text."""

    def __init__(self, row: dict[str, Any], kind: _TextKind) -> None:
        self.row = row
        self._kind = kind
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def opened(self) -> list[OutputEvent]:
        return [self._part_event("added", "")]

    def grown(self, text: str, logprobs: list[TokenLogprob]) -> list[OutputEvent]:
        self._texts.append(text)
        rows = logprob_rows(logprobs)
        self._logprobs += rows
        fields = {self._kind.index: 0, "delta": text, **self._told(rows)}
        return [(f"{self._kind.text_event}.delta", fields)]

    def closed(self, status: str) -> list[OutputEvent]:
        text = "".join(self._texts)
        self.row |= {self._kind.holder: [self._part(text)], "status": status}
        fields = {self._kind.index: 0, "text": text, **self._told(self._logprobs)}
        return [(f"{self._kind.text_event}.done", fields), self._part_event("done", text)]

    def _part(self, text: str) -> dict[str, Any]:
        return {**self._kind.part, "text": text, **self._told(self._logprobs)}

    def _told(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self._kind.has_logprobs else {}

    def _part_event(self, end: str, text: str) -> OutputEvent:
        fields = {self._kind.index: 0, "part": self._part(text)}
        return (f"{self._kind.part_event}.{end}", fields)


def message(item_id: str) -> TextItem:
    row = {"id": f"msg_{item_id}", "type": "message", "role": "assistant", "content": []}
    return TextItem(row | {"status": "in_progress"}, _MESSAGE)


def reasoning(item_id: str, signature: str, *, as_summary: bool) -> TextItem:
    """Return a reasoning item: clients that ask for a summary show that, and send it back."""
    row: dict[str, Any] = {"id": f"rs_{item_id}", "type": "reasoning", "summary": []}
    if not as_summary:
        row["content"] = []
    row |= {"encrypted_content": signature or None, "status": "in_progress"}
    return TextItem(row, _SUMMARY if as_summary else _REASONING)


# ---------------------------------------------------------------- what is called


class CallItem:
    """A call of a function, of a tool of free text, or of the client's search for tools.

    It is told as ended even where its arguments are no object, as clients wait for its end and run
    it whatever its status: a function's arguments are then the text as it is, in which a client
    finds what is wrong, and of others nothing is given, so that none runs half a call. A free text
    is sent once it is whole: it comes inside JSON.
    """

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self._pieces: list[str] = []

    def opened(self) -> list[OutputEvent]:
        return []

    def grown(self, text: str, _logprobs: list[TokenLogprob]) -> list[OutputEvent]:
        self._pieces.append(text)
        is_told = text and self.row["type"] == "function_call"
        return [(f"{_ARGUMENTS}.delta", {"delta": text})] if is_told else []

    def closed(self, status: str) -> list[OutputEvent]:
        text = "".join(self._pieces)
        given = tools.whole_object(text)
        self.row["status"] = "incomplete" if given is None else status
        if self.row["type"] == "custom_tool_call":
            self.row["input"] = free = tools.free_text(text)
            return [(f"{_INPUT}.delta", {"delta": free}), (f"{_INPUT}.done", {"input": free})]
        is_function = self.row["type"] == "function_call"
        self.row["arguments"] = text if is_function else given or {}
        done = {"arguments": text, "name": self.row.get("name")}
        return [(f"{_ARGUMENTS}.done", done)] if is_function else []


_ARGUMENTS: Final = "response.function_call_arguments"
_INPUT: Final = "response.custom_tool_call_input"


def call(item_id: str, start: CallStart, origin: ToolOrigin) -> CallItem:
    """Return the item of a call, as the client knows the tool."""
    row: dict[str, Any] = {"call_id": start.id, "status": "in_progress"}
    if origin.kind == SEARCH:
        search = {"id": f"tsc_{item_id}", "type": "tool_search_call", "execution": "client"}
        return CallItem(search | row | {"arguments": {}})
    row["name"] = origin.name
    if origin.namespace:
        row["namespace"] = origin.namespace
    if origin.kind == "custom":
        return CallItem({"id": f"ctc_{item_id}", "type": "custom_tool_call", "input": ""} | row)
    return CallItem({"id": f"fc_{item_id}", "type": "function_call", "arguments": ""} | row)


OutputItem = TextItem | CallItem

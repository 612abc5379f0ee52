"""Turns our events into the response object of OpenAI Responses, whole or as a stream."""

import time
from typing import Any, Final

from hearth.proxy.api.answer_frames import (
    AdmittedRequest,
    FrameWriter,
    extra_fields,
    image_fields,
    logprob_rows,
    prefill_fields,
    sse_event,
)
from hearth.proxy.api.body import tool_definitions as tools
from hearth.proxy.api.chat_completions.errors import openai_error
from hearth.proxy.api.responses.tools import SEARCH, ToolOrigin, responses_tools_of
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import CallStart, Delta, Finished, TokenLogprob, Usage

_ECHOED: Final = (  # as the client sent them, or null
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return `usage` as Responses have it; writing to the cache costs nothing here."""
    details = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": details | image_fields(usage),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **extra_fields(usage),
    }


def _opened(request: ParsedRequest, model: str, request_id: str) -> dict[str, Any]:
    """Return the response object before anything of it is there."""
    body = request.body
    text = body.get("text") or {}
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "model": model,
        "output": [],
        "parallel_tool_calls": request.constraints.parallel_calls,
        "reasoning": {"effort": None, "summary": None} | (body.get("reasoning") or {}),
        "service_tier": "default",
        "store": request.is_stored,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}} | {k: v for k, v in text.items() if v is not None},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": body.get("metadata") or {},
        **{name: body.get(name) for name in _ECHOED},
    }


# ---------------------------------------------------------------- the items of its output
#
# An item gives events as (kind, fields); the writer of the response numbers them and says which
# item they are of. `row` is an item's state, which changes until it is closed: `opened` gives the
# events that follow the item's own, `closed` those before its end, with the status "completed", or
# "incomplete" where the answer broke off amid it.

_ItemEvent = tuple[str, dict[str, Any]]
_ARGUMENTS: Final = "response.function_call_arguments"
_INPUT: Final = "response.custom_tool_call_input"


class _TextItem:
    """A message, or reasoning: one part of text.

    `holder` is the item's field with its parts; `part_event` and `text_event` begin the names of
    the events about the part and its text; `part` is one without its text.
    """

    def __init__(
        self,
        row: dict[str, Any],
        part: dict[str, Any],
        part_event: str,
        text_event: str,
        holder: str = "content",
    ) -> None:
        self.row = row
        self._part_fields = part
        self._part_event_name, self._text_event = part_event, text_event
        self._holder = holder
        self._index = {f"{holder}_index": 0}
        self._has_logprobs = row["type"] == "message"
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def opened(self) -> list[_ItemEvent]:
        return [self._part_event("added", "")]

    def grown(self, text: str, logprobs: list[TokenLogprob]) -> list[_ItemEvent]:
        self._texts.append(text)
        rows = logprob_rows(logprobs)
        self._logprobs += rows
        return [(f"{self._text_event}.delta", {**self._index, "delta": text, **self._told(rows)})]

    def closed(self, status: str) -> list[_ItemEvent]:
        text = "".join(self._texts)
        self.row |= {self._holder: [self._part(text)], "status": status}
        done = {**self._index, "text": text, **self._told(self._logprobs)}
        return [(f"{self._text_event}.done", done), self._part_event("done", text)]

    def _part(self, text: str) -> dict[str, Any]:
        return {**self._part_fields, "text": text, **self._told(self._logprobs)}

    def _told(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self._has_logprobs else {}

    def _part_event(self, end: str, text: str) -> _ItemEvent:
        return f"{self._part_event_name}.{end}", {**self._index, "part": self._part(text)}


def _reasoning(item_id: str, signature: str, *, as_summary: bool) -> _TextItem:
    """Return a reasoning item: clients that ask for a summary show that, and send it back."""
    row: dict[str, Any] = {"id": f"rs_{item_id}", "type": "reasoning", "summary": []}
    if not as_summary:
        row["content"] = []
    row |= {"encrypted_content": signature or None, "status": "in_progress"}
    if as_summary:
        events = ("response.reasoning_summary_part", "response.reasoning_summary_text")
        return _TextItem(row, {"type": "summary_text"}, *events, holder="summary")
    events = ("response.content_part", "response.reasoning_text")
    return _TextItem(row, {"type": "reasoning_text"}, *events)


class _CallItem:
    """A call of a function, of a tool of free text, or of the client's search for tools.

    It is told as ended even where its arguments are no object, as clients wait for its end and run
    it whatever its status: a function's arguments are then the text as it is, in which a client
    finds what is wrong, and of others nothing is given, so that none runs half a call. A free text
    is sent once it is whole: it comes inside JSON.
    """

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self._pieces: list[str] = []

    def opened(self) -> list[_ItemEvent]:
        return []

    def grown(self, text: str, _logprobs: list[TokenLogprob]) -> list[_ItemEvent]:
        self._pieces.append(text)
        is_told = text and self.row["type"] == "function_call"
        return [(f"{_ARGUMENTS}.delta", {"delta": text})] if is_told else []

    def closed(self, status: str) -> list[_ItemEvent]:
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


def _call_item(item_id: str, start: CallStart, origin: ToolOrigin) -> _CallItem:
    """Return the item of a call, as the client knows the tool."""
    row: dict[str, Any] = {"call_id": start.id, "status": "in_progress"}
    if origin.kind == SEARCH:
        search = {"id": f"tsc_{item_id}", "type": "tool_search_call", "execution": "client"}
        return _CallItem(search | row | {"arguments": {}})
    row["name"] = origin.name
    if origin.namespace:
        row["namespace"] = origin.namespace
    if origin.kind == "custom":
        return _CallItem({"id": f"ctc_{item_id}", "type": "custom_tool_call", "input": ""} | row)
    return _CallItem({"id": f"fc_{item_id}", "type": "function_call", "arguments": ""} | row)


# ---------------------------------------------------------------- the response


class ResponseWriter(FrameWriter):
    """The response object of one answer as it grows, and the numbering of its events."""

    def __init__(self, admitted: AdmittedRequest) -> None:
        body = admitted.request.body
        self._answer = admitted.answer
        self._note_end = admitted.note_end
        self._tools = responses_tools_of(body)
        asked = body.get("reasoning") or {}
        self._summarises = bool(asked.get("summary") or asked.get("generate_summary"))
        self._sequence = -1
        self._output: list[dict[str, Any]] = []
        self._item: _TextItem | _CallItem | None = None  # the open one
        self._channel = ""  # of that
        self.response = _opened(admitted.request, admitted.model, admitted.answer.request_id)

    def event(self, kind: str, data: dict[str, Any]) -> bytes:
        self._sequence += 1
        return sse_event(kind, {"sequence_number": self._sequence} | data)

    def begun(self) -> list[bytes]:
        return [self.state("response.created"), self.state("response.in_progress")]

    def ended(self, _index: int, row: Finished, _usage: Usage | None) -> list[bytes]:
        """Close the response with its usage.

        It is noted before its end is sent: who has read the end may ask for it.
        """
        cut = row.reason == "length"
        status = "incomplete" if cut else "completed"
        # an answer that held nothing at all has an empty message
        frames = [] if self._output else self._open_item(Delta("", 0, "content", ""))
        frames += self.close_item(status)
        self.response |= {
            "status": status,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": usage_fields(row.usage),
        }
        self._note_end(self.response)
        return [*frames, self.state(f"response.{status}")]

    def broken(self, error: RequestError) -> list[bytes]:
        """Close the open item, and the response with `error`."""
        frames = self.close_item("incomplete")
        told = openai_error(error)
        failure = {"code": told["code"], "message": told["message"]}
        self.response |= {"status": "failed", "error": failure}
        return [*frames, self.state("response.failed")]

    def state(self, kind: str) -> bytes:
        """Return an event that carries the whole response as it is now."""
        return self.event(kind, {"response": self.response | {"output": self._output}})

    def alive(self) -> bytes:
        """Return the event that keeps a silent stream alive; it tells how far the prefill is.

        An event, not a comment: Codex's idle timer sees only events. What is long and was told
        at the beginning is not told again.
        """
        response = self.response | {"instructions": None, "tools": [], "output": self._output}
        told = {"response": response, "prefill": prefill_fields(self._answer)}
        return self.event("response.in_progress", told)

    # -------------------------------------------------- items: each opened, grown, closed

    def grown(self, _index: int, delta: Delta) -> list[bytes]:
        """Return the events for `delta`, which may end one item and open the next."""
        frames = []
        if delta.call is not None or self._item is None or delta.channel != self._channel:
            if delta.call is None and not delta.text:
                return []  # nothing to open an item for
            frames = [*self.close_item(), *self._open_item(delta)]
        assert self._item is not None
        if delta.text or delta.logprobs:
            frames += self._events(self._item.grown(delta.text, delta.logprobs))
        return frames

    def _open_item(self, delta: Delta) -> list[bytes]:
        item_id = f"{self._answer.request_id}_{len(self._output)}"
        self._channel = delta.channel
        if delta.channel == "tool_call":
            assert delta.call is not None, "the worker begins each call with its name"
            self._item = _call_item(item_id, delta.call, self._tools.origin(delta.call.name))
        elif delta.channel == "reasoning":
            self._item = _reasoning(item_id, self._answer.signature, as_summary=self._summarises)
        else:
            row = {"id": f"msg_{item_id}", "type": "message", "role": "assistant", "content": []}
            part = {"type": "output_text", "annotations": []}
            events = ("response.content_part", "response.output_text")
            self._item = _TextItem(row | {"status": "in_progress"}, part, *events)
        self._output.append(self._item.row)
        return [self._item_event("added"), *self._events(self._item.opened())]

    def close_item(self, status: str = "completed") -> list[bytes]:
        """Return the events that end the open item; none where none is open."""
        item, self._item = self._item, None
        if item is None:
            return []
        return [*self._events(item.closed(status)), self._item_event("done")]

    def _item_event(self, end: str) -> bytes:
        """Return the event that begins or ends the newest item."""
        told = {"output_index": len(self._output) - 1, "item": self._output[-1]}
        return self.event(f"response.output_item.{end}", told)

    def _events(self, events: list[_ItemEvent]) -> list[bytes]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return [self.event(kind, place | fields) for kind, fields in events]


async def whole(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return the response once it is complete.

    Raises:
        RequestError: it broke off.
    """
    writer = ResponseWriter(admitted)
    while not isinstance(row := await admitted.answer.next_event(), Finished):
        if row is not None:
            writer.grown(0, row)
    writer.ended(0, row, None)
    return writer.response

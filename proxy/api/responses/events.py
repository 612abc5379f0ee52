"""Writes an answer as the response object of OpenAI Responses, whole or as a stream."""

import time
from typing import Any, Final

from hearth.proxy.api.answer_frames import (
    AdmittedRequest,
    FrameWriter,
    extra_fields,
    image_fields,
    logprob_entries,
    prefill_fields,
)
from hearth.proxy.api.body import tool_definitions as tools
from hearth.proxy.api.chat_completions.errors import openai_error
from hearth.proxy.api.responses.tools import SEARCH, ToolOrigin, responses_tools_of
from hearth.proxy.api.server_sent_events import sse_event
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import CallStart, Delta, Finished, TokenLogprob, Usage

_ECHOED: Final = (  # fields that the response repeats from the body, or null
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return `usage` in the fields of Responses; cache writes are free here, so they count as 0."""
    details = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": details | image_fields(usage),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **extra_fields(usage),
    }


def _initial_response(request: ParsedRequest, model: str, request_id: str) -> dict[str, Any]:
    """Return the response object as it is before its first item."""
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


# ---------------------------------------------------------------- output items
#
# An item returns its events as (kind, fields). The ResponseWriter adds their sequence numbers and
# the item's id. `fields` is the item's JSON object, which changes until the item is closed.
# `opening_events` follow the item's first event, and `closing_events` precede its last event. The
# status is "completed", or "incomplete" if the answer ended inside the item.

_ItemEvent = tuple[str, dict[str, Any]]
_ARGUMENTS: Final = "response.function_call_arguments"
_INPUT: Final = "response.custom_tool_call_input"


class _TextItem:
    """A message or a reasoning item, which has one part of text.

    `holder` is the name of the item's field with its parts, and `part` is the part without its
    text. `part_event` and `text_event` begin the names of the events about the part and about its
    text.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        part: dict[str, Any],
        part_event: str,
        text_event: str,
        holder: str = "content",
    ) -> None:
        self.fields = fields
        self._part_fields = part
        self._part_event_name, self._text_event = part_event, text_event
        self._holder = holder
        self._index = {f"{holder}_index": 0}
        self._has_logprobs = fields["type"] == "message"
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def opening_events(self) -> list[_ItemEvent]:
        return [self._part_event("added", "")]

    def delta_events(self, text: str, logprobs: list[TokenLogprob]) -> list[_ItemEvent]:
        self._texts.append(text)
        entries = logprob_entries(logprobs)
        self._logprobs += entries
        return [
            (
                f"{self._text_event}.delta",
                {**self._index, "delta": text, **self._logprob_fields(entries)},
            )
        ]

    def closing_events(self, status: str) -> list[_ItemEvent]:
        text = "".join(self._texts)
        self.fields |= {self._holder: [self._part(text)], "status": status}
        done = {**self._index, "text": text, **self._logprob_fields(self._logprobs)}
        return [(f"{self._text_event}.done", done), self._part_event("done", text)]

    def _part(self, text: str) -> dict[str, Any]:
        return {**self._part_fields, "text": text, **self._logprob_fields(self._logprobs)}

    def _logprob_fields(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self._has_logprobs else {}

    def _part_event(self, end: str, text: str) -> _ItemEvent:
        return f"{self._part_event_name}.{end}", {**self._index, "part": self._part(text)}


def _reasoning(item_id: str, signature: str, *, as_summary: bool) -> _TextItem:
    """Return a reasoning item; its text is in the summary for clients that ask for a summary."""
    item: dict[str, Any] = {"id": f"rs_{item_id}", "type": "reasoning", "summary": []}
    if not as_summary:
        item["content"] = []
    item |= {"encrypted_content": signature or None, "status": "in_progress"}
    if as_summary:
        events = ("response.reasoning_summary_part", "response.reasoning_summary_text")
        return _TextItem(item, {"type": "summary_text"}, *events, holder="summary")
    events = ("response.content_part", "response.reasoning_text")
    return _TextItem(item, {"type": "reasoning_text"}, *events)


class _CallItem:
    """A call of a function, of a custom tool, or of the client's tool search.

    The call is sent as done even if its arguments are not an object, as clients wait for the end
    of a call and run the call whatever its status. A function then gets the invalid text, in which
    the client finds the error. The other tools get empty arguments, so that no client runs half a
    call. A custom tool's input is sent only when complete, as the model writes it inside JSON.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self._pieces: list[str] = []

    def opening_events(self) -> list[_ItemEvent]:
        return []

    def delta_events(self, text: str, _logprobs: list[TokenLogprob]) -> list[_ItemEvent]:
        self._pieces.append(text)
        is_sent = text and self.fields["type"] == "function_call"
        return [(f"{_ARGUMENTS}.delta", {"delta": text})] if is_sent else []

    def closing_events(self, status: str) -> list[_ItemEvent]:
        text = "".join(self._pieces)
        arguments = tools.parsed_object(text)
        self.fields["status"] = "incomplete" if arguments is None else status
        if self.fields["type"] == "custom_tool_call":
            self.fields["input"] = free_text = tools.free_text(text)
            return [
                (f"{_INPUT}.delta", {"delta": free_text}),
                (f"{_INPUT}.done", {"input": free_text}),
            ]
        is_function = self.fields["type"] == "function_call"
        self.fields["arguments"] = text if is_function else arguments or {}
        done = {"arguments": text, "name": self.fields.get("name")}
        return [(f"{_ARGUMENTS}.done", done)] if is_function else []


def _call_item(item_id: str, start: CallStart, origin: ToolOrigin) -> _CallItem:
    """Return the item of a call of the tool `origin`."""
    fields: dict[str, Any] = {"call_id": start.id, "status": "in_progress"}
    if origin.kind == SEARCH:
        search = {"id": f"tsc_{item_id}", "type": "tool_search_call", "execution": "client"}
        return _CallItem(search | fields | {"arguments": {}})
    fields["name"] = origin.name
    if origin.namespace:
        fields["namespace"] = origin.namespace
    if origin.kind == "custom":
        return _CallItem({"id": f"ctc_{item_id}", "type": "custom_tool_call", "input": ""} | fields)
    return _CallItem({"id": f"fc_{item_id}", "type": "function_call", "arguments": ""} | fields)


# ---------------------------------------------------------------- the response


class ResponseWriter(FrameWriter):
    """Writes the events of one answer, numbers them, and builds the response object."""

    def __init__(self, admitted: AdmittedRequest) -> None:
        body = admitted.request.body
        self._answer = admitted.answer
        self._store_response = admitted.store_response
        self._tools = responses_tools_of(body)
        reasoning = body.get("reasoning") or {}
        self._summarises = bool(reasoning.get("summary") or reasoning.get("generate_summary"))
        self._sequence = -1
        self._output: list[dict[str, Any]] = []
        self._item: _TextItem | _CallItem | None = None  # item that is open
        self._channel = ""  # channel of the open item
        self.response = _initial_response(
            admitted.request, admitted.model, admitted.answer.request_id
        )

    def event(self, kind: str, data: dict[str, Any]) -> bytes:
        self._sequence += 1
        return sse_event(kind, {"sequence_number": self._sequence} | data)

    def opening_frames(self) -> list[bytes]:
        return [self.state("response.created"), self.state("response.in_progress")]

    def final_frames(self, _index: int, event: Finished, _usage: Usage | None) -> list[bytes]:
        """Close the response with its usage.

        The response is stored before the last event, after which the client may ask for it.
        """
        cut = event.reason == "length"
        status = "incomplete" if cut else "completed"
        # an empty answer has an empty message
        frames = [] if self._output else self._open_item(Delta("", 0, "content", ""))
        frames += self.close_item(status)
        self.response |= {
            "status": status,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": usage_fields(event.usage),
        }
        self._store_response(self.response)
        return [*frames, self.state(f"response.{status}")]

    def error_frames(self, error: RequestError) -> list[bytes]:
        """Close the open item, and the response with `error`."""
        frames = self.close_item("incomplete")
        fields = openai_error(error)
        failure = {"code": fields["code"], "message": fields["message"]}
        self.response |= {"status": "failed", "error": failure}
        return [*frames, self.state("response.failed")]

    def state(self, kind: str) -> bytes:
        """Return an event that carries the whole response as it is now."""
        return self.event(kind, {"response": self.response | {"output": self._output}})

    def keep_alive_frame(self) -> bytes:
        """Return the event that keeps a silent stream alive and reports the prefill's progress.

        It is an event, not a comment, as Codex's idle timer sees events only. Long fields that the
        first event had are left out.
        """
        response = self.response | {"instructions": None, "tools": [], "output": self._output}
        data = {"response": response, "prefill": prefill_fields(self._answer)}
        return self.event("response.in_progress", data)

    # -------------------------------------------------- items

    def delta_frames(self, _index: int, delta: Delta) -> list[bytes]:
        """Return the events for `delta`, which may close one item and open the next."""
        frames = []
        if delta.call is not None or self._item is None or delta.channel != self._channel:
            if delta.call is None and not delta.text:
                return []  # an empty text opens no item
            frames = [*self.close_item(), *self._open_item(delta)]
        assert self._item is not None
        if delta.text or delta.logprobs:
            frames += self._events(self._item.delta_events(delta.text, delta.logprobs))
        return frames

    def _open_item(self, delta: Delta) -> list[bytes]:
        item_id = f"{self._answer.request_id}_{len(self._output)}"
        self._channel = delta.channel
        if delta.channel == "tool_call":
            assert delta.call is not None, "a call began without its name"
            self._item = _call_item(item_id, delta.call, self._tools.origin(delta.call.name))
        elif delta.channel == "reasoning":
            self._item = _reasoning(item_id, self._answer.signature, as_summary=self._summarises)
        else:
            item = {"id": f"msg_{item_id}", "type": "message", "role": "assistant", "content": []}
            part = {"type": "output_text", "annotations": []}
            events = ("response.content_part", "response.output_text")
            self._item = _TextItem(item | {"status": "in_progress"}, part, *events)
        self._output.append(self._item.fields)
        return [self._item_event("added"), *self._events(self._item.opening_events())]

    def close_item(self, status: str = "completed") -> list[bytes]:
        """Return the events that close the open item; none if no item is open."""
        item, self._item = self._item, None
        if item is None:
            return []
        return [*self._events(item.closing_events(status)), self._item_event("done")]

    def _item_event(self, end: str) -> bytes:
        """Return the first ("added") or last ("done") event of the newest item."""
        data = {"output_index": len(self._output) - 1, "item": self._output[-1]}
        return self.event(f"response.output_item.{end}", data)

    def _events(self, events: list[_ItemEvent]) -> list[bytes]:
        item_fields = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return [self.event(kind, item_fields | fields) for kind, fields in events]


async def whole(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return the response once it is complete.

    Raises:
        RequestError: the answer failed.
    """
    writer = ResponseWriter(admitted)
    while not isinstance(event := await admitted.answer.next_event(), Finished):
        if event is not None:
            writer.delta_frames(0, event)
    writer.final_frames(0, event, None)
    return writer.response

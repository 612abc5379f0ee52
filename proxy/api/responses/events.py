"""Turns our events into the response object of OpenAI Responses, whole or as a stream."""

import time
from typing import Any, Final

from hearth.proxy.api.answer_frames import FrameWriter, extra_fields, image_fields, sse_event
from hearth.proxy.api.chat_completions.errors import openai_error
from hearth.proxy.api.multi_choice_stream import AdmittedRequest
from hearth.proxy.api.responses import output_items
from hearth.proxy.api.responses.output_items import OutputItem
from hearth.proxy.api.responses.tools import responses_tools_of
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Delta, Finished, Usage

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
        self._item: OutputItem | None = None  # the open one
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
        done, whole = self._answer.done_tokens, self._answer.prompt_tokens
        progress = {"done_tokens": done, "prompt_tokens": whole}
        return self.event("response.in_progress", {"response": response, "prefill": progress})

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
            origin = self._tools.origin(delta.call.name)
            self._item = output_items.call(item_id, delta.call, origin)
        elif delta.channel == "reasoning":
            signature = self._answer.signature
            self._item = output_items.reasoning(item_id, signature, as_summary=self._summarises)
        else:
            self._item = output_items.message(item_id)
        self._output.append(self._item.row)
        index = len(self._output) - 1
        told = {"output_index": index, "item": self._item.row}
        added = self.event("response.output_item.added", told)
        return [added, *self._events(self._item.opened())]

    def close_item(self, status: str = "completed") -> list[bytes]:
        """Return the events that end the open item; none where none is open."""
        item, self._item = self._item, None
        if item is None:
            return []
        frames = self._events(item.closed(status))
        index = len(self._output) - 1
        told = {"output_index": index, "item": item.row}
        frames.append(self.event("response.output_item.done", told))
        return frames

    def _events(self, events: list[output_items.OutputEvent]) -> list[bytes]:
        item = self._output[-1]
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
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

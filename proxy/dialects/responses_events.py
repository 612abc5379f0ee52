"""Our events as OpenAI Responses: the response object and its stream."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from proxy.dialects.chat import kv_cache_fields
from proxy.dialects.sse import PING_S, event
from proxy.failures import openai_error
from proxy.request import Ticket
from shared.errors import RequestError
from shared.wire import Delta, Finished, Usage


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "kv_cache": kv_cache_fields(usage),
    }


class _Builder:
    """The response object of one answer as it grows, and the numbering of its events."""

    def __init__(self, ticket: Ticket) -> None:
        body = ticket.request.body
        self.id = f"resp_{ticket.answer.request_id}"
        self._suffix = ticket.answer.request_id
        self._sequence = -1
        self.output: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._channel = ""
        self._response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,  # not echoed: agents send hundreds of kilobytes
            "max_output_tokens": body.get("max_output_tokens"),
            "model": ticket.model,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": ticket.request.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],  # not echoed either
            "top_p": ticket.request.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": body.get("metadata") or {},
        }

    def event(self, kind: str, **data: Any) -> bytes:
        self._sequence += 1
        return event(kind, {"sequence_number": self._sequence, **data})

    def state(self, kind: str) -> bytes:
        """Return an event that carries the whole response as it is now."""
        return self.event(kind, response=self._response | {"output": self.output})

    def finish(self, finished: Finished) -> dict[str, Any]:
        """Close the response with its usage, and return it."""
        cut = finished.reason == "length"
        self._response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self.output,
            "usage": usage_fields(finished.usage),
        }
        return self._response

    def fail(self, error: RequestError) -> None:
        """Close the response with `error`; what there was of the open item stays in it."""
        if self._channel:
            part = self._part("".join(self._texts))
            self.output[-1] |= {"content": [part], "status": "incomplete"}
        told = openai_error(error)
        self._response |= {
            "status": "failed",
            "error": {"code": told["code"], "message": told["message"]},
        }

    # -------------------------------------------------- items: each opened, grown, closed

    def grow(self, delta: Delta) -> list[bytes]:
        """Return the events for `delta`, which may end one item and open the next."""
        frames = []
        if delta.channel != self._channel:
            frames = [*self.close_item(), *self._open_item(delta.channel)]
        self._texts.append(delta.text)
        kind = "reasoning_text" if self._channel == "reasoning" else "output_text"
        extra: dict[str, Any] = {} if self._channel == "reasoning" else {"logprobs": []}
        frames.append(
            self.event(f"response.{kind}.delta", **self._place(), delta=delta.text, **extra)
        )
        return frames

    def _place(self) -> dict[str, Any]:
        item = self.output[-1]
        return {"item_id": item["id"], "output_index": len(self.output) - 1, "content_index": 0}

    def _open_item(self, channel: str) -> list[bytes]:
        self._channel, self._texts = channel, []
        item: dict[str, Any]
        if channel == "reasoning":
            item = {"id": f"rs_{self._suffix}_{len(self.output)}", "type": "reasoning"}
            item |= {"summary": [], "content": [], "status": "in_progress"}
        else:
            item = {"id": f"msg_{self._suffix}_{len(self.output)}", "type": "message"}
            item |= {"role": "assistant", "content": [], "status": "in_progress"}
        self.output.append(item)
        index = len(self.output) - 1
        return [
            self.event("response.output_item.added", output_index=index, item=item),
            self.event("response.content_part.added", **self._place(), part=self._part("")),
        ]

    def _part(self, text: str) -> dict[str, Any]:
        if self._channel == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def close_item(self) -> list[bytes]:
        """Return the events that end the open item; none where none is open."""
        if not self._channel:
            return []
        text, place = "".join(self._texts), self._place()
        kind = "reasoning_text" if self._channel == "reasoning" else "output_text"
        extra: dict[str, Any] = {} if self._channel == "reasoning" else {"logprobs": []}
        item = self.output[-1]
        item |= {"content": [self._part(text)], "status": "completed"}
        frames = [
            self.event(f"response.{kind}.done", **place, text=text, **extra),
            self.event("response.content_part.done", **place, part=self._part(text)),
            self.event("response.output_item.done", output_index=place["output_index"], item=item),
        ]
        self._channel = ""
        return frames

    def ensure_message(self) -> list[bytes]:
        """Return the events of an empty message where the answer held no text at all."""
        return [] if self.output else self._open_item("content")


async def whole(ticket: Ticket) -> dict[str, Any]:
    """Return the response once it is complete.

    Raises:
        RequestError: it broke off.
    """
    builder = _Builder(ticket)
    while True:
        row = await ticket.answer.next_event()
        if isinstance(row, Finished):
            builder.ensure_message()
            builder.close_item()
            return builder.finish(row)
        if isinstance(row, Delta):
            builder.grow(row)


async def events(ticket: Ticket) -> AsyncGenerator[bytes, None]:
    """Yield the stream of `ticket`; where it breaks off, response.failed is its end."""
    builder = _Builder(ticket)
    yield builder.state("response.created")
    yield builder.state("response.in_progress")
    try:
        while not isinstance(row := await ticket.answer.next_event(PING_S), Finished):
            if row is None:  # an event, not a comment: Codex's idle timer sees only events
                yield builder.state("response.in_progress")
                continue
            for frame in builder.grow(row):
                yield frame
        for frame in (*builder.ensure_message(), *builder.close_item()):
            yield frame
        status = builder.finish(row)["status"]
        yield builder.state(f"response.{status}")
    except RequestError as error:
        ticket.failure = error
        builder.fail(error)
        yield builder.state("response.failed")
    finally:
        ticket.answer.close()

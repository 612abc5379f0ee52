"""Turns our events into Anthropic's message, whole or as a stream."""

import re
from collections.abc import AsyncGenerator
from typing import Any, Final

import orjson

from hearth.proxy.api import server_sent_events as sse
from hearth.proxy.api.answer_frames import frames
from hearth.proxy.api.body import tool_definitions as tools
from hearth.proxy.api.error_bodies import anthropic_error
from hearth.proxy.api.usage_extras import extra_fields
from hearth.proxy.request.parsed_request import AdmittedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Delta, Finished, Usage

_STOP_REASONS: Final = {
    **{"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"},
    "prefilled": "max_tokens",  # which were 0
}
_DELTA_HEAD: Final = b"event: content_block_delta\ndata: "
_DELTAS: Final = {  # by channel: the type of a block's piece, and its field
    "tool_call": ("input_json_delta", "partial_json"),
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
}
_BLANKS: Final = r"[ \t\r\n]*"  # of JSON
_BEGINNING: Final = re.compile(  # of an input
    rf'{_BLANKS}(?:(?P<object>\{{{_BLANKS}["}}])|\{{{_BLANKS}[^ \t\r\n"}}]|[^ \t\r\n{{])'
)
_HIDDEN: Final = "omitted"  # the thinking.display under which only its signature is sent


def usage_fields(usage: Usage, is_marked: bool) -> dict[str, Any]:
    """Return `usage` as Messages have it: input, creation and read together are the prompt.

    What was not read from the cache was prefilled and is kept; it counts as its creation where the
    client marked what to keep (`is_marked`), and as plain input where it did not.
    """
    fresh = usage.prompt_tokens - usage.cached_tokens
    return {
        **_input_fields(fresh, usage.cached_tokens, is_marked),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        **extra_fields(usage),
    }


def _input_fields(fresh: int, cached: int, is_marked: bool) -> dict[str, int]:
    return {
        "input_tokens": 0 if is_marked else fresh,
        "cache_creation_input_tokens": fresh if is_marked else 0,
        "cache_read_input_tokens": cached,
    }


def _is_marked(admitted: AdmittedRequest) -> bool:
    """Return whether the client marked anything with `cache_control`."""
    body = admitted.request.body
    blocks: list[Any] = [body]
    for value in (body.get("tools"), body.get("system"), body.get("messages")):
        blocks += _within(value)
    return any(type(block) is dict and bool(block.get("cache_control")) for block in blocks)


def _within(content: Any) -> list[Any]:
    """Return the rows of `content` and those within them: messages, blocks, blocks of results."""
    rows = content if type(content) is list else []
    inner = (row.get("content") for row in rows if type(row) is dict)
    return [*rows, *(block for each in inner for block in _within(each))]


def _ending(finished: Finished) -> dict[str, Any]:
    if finished.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_sequence}
    reason = _STOP_REASONS.get(finished.reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


class _MessageWriter:
    """One message as it grows: its blocks are opened, grown, closed, and then never changed.

    A tool's input is complete in its block's end only. What the stream gives of it is an object,
    which clients' SDKs raise without, and begins as one: a text that is none is told as `{}`. An
    object that was cut off stays cut, and the whole message has its complete pairs: closed by us,
    a client would take half a command for a whole one and run it.
    """

    def __init__(self, admitted: AdmittedRequest) -> None:
        self.content: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open block
        self._channel = ""  # of the open block; "" where none is open
        self._is_object: bool | None = None  # the open call's input; None where it has not begun
        self._answer, self._model = admitted.answer, admitted.model
        self.is_marked = _is_marked(admitted)
        thinking = admitted.request.body.get("thinking")
        display = thinking.get("display") if type(thinking) is dict else None
        self._hides_thinking = display == _HIDDEN

    def shell(self) -> dict[str, Any]:
        """Return the message before anything of it is there."""
        answer = self._answer
        fresh = answer.prompt_tokens - answer.cached_tokens
        used = _input_fields(fresh, answer.cached_tokens, self.is_marked) | {"output_tokens": 0}
        return {
            "id": f"msg_{answer.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": used,
        }

    def begun(self) -> list[bytes]:
        return [sse.event("message_start", {"message": self.shell()}), self.alive()]

    def ended(self, _index: int, row: Finished, _usage: Usage | None) -> list[bytes]:
        used = usage_fields(row.usage, self.is_marked)
        end = sse.event("message_delta", {"delta": _ending(row), "usage": used})
        return [*self.end(row), end, sse.event("message_stop", {})]

    def alive(self) -> bytes:
        done, prompt = self._answer.done_tokens, self._answer.prompt_tokens
        return sse.event("ping", {"prefill": {"done_tokens": done, "prompt_tokens": prompt}})

    def broken(self, error: RequestError) -> list[bytes]:
        return [sse.event("error", {"error": anthropic_error(error)})]

    def grown(self, _index: int, row: Delta) -> list[bytes]:
        """Return the events for `row`, which may end one block and begin the next."""
        frames = []
        if row.call is not None or row.channel != self._channel:
            if row.call is None and not row.text:
                return []  # nothing to open a block for
            frames = [*self.close(), self._open(row)]
        self._pieces.append(row.text)
        text = row.text
        if self._channel == "tool_call":
            if self._is_object is None:  # its input has not begun
                text = "".join(self._pieces)
                if found := _BEGINNING.match(text):
                    self._is_object = bool(found["object"])
            text = text if self._is_object else ""
        if text and not (self._channel == "reasoning" and self._hides_thinking):
            frames.append(self._delta(text))
        return frames

    def end(self, finished: Finished) -> list[bytes]:
        """Return the events behind the last piece: of an empty text where there was none at all."""
        is_empty = not self.content and finished.reason != "prefilled"
        frames = [self._open(Delta("", 0, "content", ""))] if is_empty else []
        return [*frames, *self.close(is_cut=finished.is_cut)]

    def close(self, *, is_cut: bool = False) -> list[bytes]:
        """Return the events that end the open block; none where none is open."""
        if not self._channel:
            return []
        index, block, text = len(self.content) - 1, self.content[-1], "".join(self._pieces)
        frames = []
        if self._channel == "tool_call":
            block["input"] = tools.whole_pairs(text) if self._is_object else {}
            if is_cut and self._is_object is None:
                frames.append(self._delta(text if text.strip() else "{"))  # whole, it is run
            elif not self._is_object:
                frames.append(self._delta("{}"))
        elif self._channel == "reasoning":
            block["thinking"] = "" if self._hides_thinking else text
            block["signature"] = signature = self._answer.signature
            if signature:
                signed = {"type": "signature_delta", "signature": signature}
                signing = {"index": index, "delta": signed}
                frames.append(sse.event("content_block_delta", signing))
        else:
            block["text"] = text
        self._channel = ""
        return [*frames, sse.event("content_block_stop", {"index": index})]

    def _open(self, row: Delta) -> bytes:
        self._channel, self._pieces, self._is_object = row.channel, [], None
        block: dict[str, Any]
        if row.channel == "tool_call":
            assert row.call is not None, "the worker begins each call with its name"
            # The id as it is: the worker finds the turn again by it.
            block = {"type": "tool_use", "id": row.call.id, "name": row.call.name, "input": {}}
        elif row.channel == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self.content.append(block)
        start = {"index": len(self.content) - 1, "content_block": block}
        return sse.event("content_block_start", start)

    def _delta(self, text: str) -> bytes:
        kind, name = _DELTAS[self._channel]
        delta = {"type": kind, name: text}
        row = {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}
        return _DELTA_HEAD + orjson.dumps(row) + b"\n\n"  # as `sse.event`, in half the time


async def whole(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return the message once it is complete.

    Raises:
        RequestError: it broke off.
    """
    writer = _MessageWriter(admitted)
    while not isinstance(row := await admitted.answer.next_event(), Finished):
        if row is not None:
            writer.grown(0, row)
    writer.end(row)
    used = usage_fields(row.usage, writer.is_marked)
    return writer.shell() | {"content": writer.content, "usage": used} | _ending(row)


def events(admitted: AdmittedRequest) -> AsyncGenerator[bytes, None]:
    """Return the stream of `admitted`."""
    return frames(admitted, _MessageWriter(admitted))

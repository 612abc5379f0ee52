"""Turns our events into Anthropic's message, whole or as a stream."""

import re
from typing import Any, Final

import orjson

from hearth.proxy.api.answer_frames import (
    AdmittedRequest,
    FrameWriter,
    extra_fields,
    prefill_fields,
    sse_event,
    whole_choices,
)
from hearth.proxy.api.body import tool_definitions as tools
from hearth.proxy.api.messages.errors import error_event
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import CallStart, Delta, Finished, Usage

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
    return {
        **_input_fields(usage, is_marked),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        **extra_fields(usage),
    }


def _input_fields(prompt: Usage | AnswerStream, is_marked: bool) -> dict[str, int]:
    fresh = prompt.prompt_tokens - prompt.cached_tokens
    return {
        "input_tokens": 0 if is_marked else fresh,
        "cache_creation_input_tokens": fresh if is_marked else 0,
        "cache_read_input_tokens": prompt.cached_tokens,
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
    reason = _STOP_REASONS.get(finished.reason, "end_turn")
    if finished.stop_sequence is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": finished.stop_sequence}


def _shell(admitted: AdmittedRequest, is_marked: bool) -> dict[str, Any]:
    """Return the message before anything of it is there."""
    answer = admitted.answer
    return {
        "id": f"msg_{answer.request_id}",
        "type": "message",
        "role": "assistant",
        "model": admitted.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _input_fields(answer, is_marked) | {"output_tokens": 0},
    }


def _block(channel: str, call: CallStart | None, text: str, signature: str) -> dict[str, Any]:
    """Return the block that has said `text`; with "" it is as it begins."""
    if call is not None:
        found = _BEGINNING.match(text)
        given = tools.whole_pairs(text) if found and found["object"] else {}
        # The id as it is: the worker finds the turn again by it.
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}
    if channel == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": signature}
    return {"type": "text", "text": text}


def _hides_thinking(admitted: AdmittedRequest) -> bool:
    thinking = admitted.request.body.get("thinking")
    return type(thinking) is dict and thinking.get("display") == _HIDDEN


async def whole(admitted: AdmittedRequest) -> dict[str, Any]:
    """Return the message once it is complete.

    Raises:
        RequestError: it broke off.
    """
    (choice,), usage = await whole_choices(admitted)
    is_marked, hides = _is_marked(admitted), _hides_thinking(admitted)
    blocks = [
        _block(
            *(channel, call),
            "" if hides and channel == "reasoning" else "".join(texts),
            admitted.answer.signature,
        )
        for channel, call, texts in choice.parts
    ]
    if not blocks and choice.end.reason != "prefilled":
        blocks = [{"type": "text", "text": ""}]
    told = {"content": blocks, "usage": usage_fields(usage, is_marked)}
    return _shell(admitted, is_marked) | told | _ending(choice.end)


class MessageWriter(FrameWriter):
    """The events of one message as it grows: its blocks are opened, grown and closed.

    A tool's input is complete in its block's end only. What the stream gives of it is an object,
    which clients' SDKs raise without, and begins as one: a text that is none is told as `{}`. An
    object that was cut off stays cut, and the whole message has its complete pairs: closed by us,
    a client would take half a command for a whole one and run it.
    """

    def __init__(self, admitted: AdmittedRequest) -> None:
        self._admitted, self._answer = admitted, admitted.answer
        self._index = -1  # of the newest block
        self._channel = ""  # of the open block; "" where none is open
        self._input = ""  # of the open call, while it has not begun
        self._is_object: bool | None = None  # the open call's input; None where it has not begun
        self._is_marked = _is_marked(admitted)
        self._hides_thinking = _hides_thinking(admitted)

    def begun(self) -> list[bytes]:
        shell = _shell(self._admitted, self._is_marked)
        return [sse_event("message_start", {"message": shell}), self.alive()]

    def ended(self, _index: int, row: Finished, _usage: Usage | None) -> list[bytes]:
        """Return the events behind the last piece: of an empty text where there was none at all."""
        is_empty = self._index < 0 and row.reason != "prefilled"
        frames = [self._open(Delta("", 0, "content", ""))] if is_empty else []
        told = {"delta": _ending(row), "usage": usage_fields(row.usage, self._is_marked)}
        ends = [sse_event("message_delta", told), sse_event("message_stop", {})]
        return [*frames, *self._close(is_cut=row.is_cut), *ends]

    def alive(self) -> bytes:
        return sse_event("ping", {"prefill": prefill_fields(self._answer)})

    def broken(self, error: RequestError) -> list[bytes]:
        return [error_event(error)]

    def grown(self, _index: int, row: Delta) -> list[bytes]:
        """Return the events for `row`, which may end one block and begin the next."""
        frames = []
        if row.call is not None or row.channel != self._channel:
            if row.call is None and not row.text:
                return []  # nothing to open a block for
            frames = [*self._close(), self._open(row)]
        text = row.text
        if self._channel == "tool_call":
            if self._is_object is None:
                self._input = text = self._input + text
                if found := _BEGINNING.match(text):
                    self._is_object = bool(found["object"])
            text = text if self._is_object else ""
        if text and not (self._channel == "reasoning" and self._hides_thinking):
            frames.append(self._delta(text))
        return frames

    def _close(self, *, is_cut: bool = False) -> list[bytes]:
        """Return the events that end the open block; none where none is open."""
        if not self._channel:
            return []
        frames = []
        if self._channel == "tool_call" and not self._is_object:
            is_bare = is_cut and self._is_object is None  # and told as {} it would be run
            cut = self._input if self._input.strip() else "{"
            frames.append(self._delta(cut if is_bare else "{}"))
        elif self._channel == "reasoning" and (signature := self._answer.signature):
            signed = {"type": "signature_delta", "signature": signature}
            signing = {"index": self._index, "delta": signed}
            frames.append(sse_event("content_block_delta", signing))
        self._channel = ""
        return [*frames, sse_event("content_block_stop", {"index": self._index})]

    def _open(self, row: Delta) -> bytes:
        self._index, self._channel, self._input = self._index + 1, row.channel, ""
        self._is_object = None
        start = {"index": self._index, "content_block": _block(row.channel, row.call, "", "")}
        return sse_event("content_block_start", start)

    def _delta(self, text: str) -> bytes:
        kind, name = _DELTAS[self._channel]
        row = {
            "type": "content_block_delta",
            "index": self._index,
            "delta": {"type": kind, name: text},
        }
        return _DELTA_HEAD + orjson.dumps(row) + b"\n\n"  # as `sse_event`, in half the time
